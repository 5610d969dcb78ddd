"""Two layers of the release's width against transformers on the same GPU: one sliding, one full, all 384 experts.

What the tiny model cannot show: hidden size 4608, 48/8 heads of 128, a window and an extent of 1024 that a prompt of
3,000 tokens passes, 384 experts in NVFP4 and in MXFP8. The weights are random; what matters is that transformers gets
the engine's own, its experts decoded from Marlin's bytes. The bar is how far transformers' bfloat16 is from float32.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from inkling_rl.formats import marlin, mixed
from tests.benchmarks.slice_model import slice_config, slice_quant_config
from tests.benchmarks.slice_steps import Step, build, fill_pages
from tests.gpu.engines import Errors, Watched, engine, is_second_runner
from tests.rollout.engines import generate, random_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

VOCABULARY = 16384
CHANGES = {
    "vocab_size": VOCABULARY, "unpadded_vocab_size": VOCABULARY,  # the head is not what is tested here
    "n_layers_per_attn_res_block": 1,  # so that mixtures have up to three sources
    "log_scaling_n_floor": 512, "max_position_embeddings": 4096,
}  # fmt: skip
AT_ONCE = 16
REPLAYS = 20
# (tokens already there, rows of this step); sixteen rows are for Marlin.
STEPS = {
    "one": ((1500, 1),),
    "eight": tuple((past, 1) for past in (30, 200, 511, 700, 1023, 1024, 1025, 3000)),
    "draft": ((1500, 8),),
    "two drafts": ((90, 8), (2000, 8)),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("width")
    files = {"config.json": slice_config(2) | CHANGES, "hf_quant_config.json": slice_quant_config(2)}
    for name, content in files.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    return path


class SharedExperts(nn.Module):
    """transformers' experts, in the dtype of their input, over weights that two models share."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_up, self.down, self.act_fn = gate_up, down, act_fn

    def forward(self, x_TH: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        out_TH = torch.zeros_like(x_TH, dtype=torch.float32)
        for expert in experts_TK.unique().tolist():
            rows, ranks = torch.where(experts_TK == expert)
            gate, up = F.linear(x_TH[rows], self.gate_up[expert].to(x_TH.dtype)).chunk(2, dim=-1)
            down_TH = F.linear(self.act_fn(gate, up), self.down[expert].to(x_TH.dtype))
            out_TH.index_add_(0, rows, (down_TH * weights_TK[rows, ranks, None]).float())
        return out_TH.to(x_TH.dtype)


@torch.no_grad()
def own_experts(module: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give every expert of a layer weights of its own, and return what Marlin makes of them, bfloat16."""
    engine = dict(module.named_parameters())
    num, hidden, width = len(engine["w2_weight"]), engine["w2_weight_scale"].shape[-1], module.expert_width
    generator = torch.Generator("cuda").manual_seed(layer)
    gate_up = torch.empty(num, 2 * width, hidden, dtype=torch.bfloat16, device="cuda")
    down = torch.empty(num, hidden, width, dtype=torch.bfloat16, device="cuda")
    for first in range(0, num, AT_ONCE):
        some = slice(first, first + AT_ONCE)
        for whole in (gate_up[some], down[some]):
            whole.normal_(0.0, whole.shape[-1] ** -0.5, generator=generator)
        made = marlin.from_weights(gate_up[some], down[some], module.expert_format)
        for key, parameter in engine.items():
            parameter[some] = made[key]
        values = (marlin.dequantize(made, m, module.expert_format, width, torch.bfloat16) for m in mixed.MATRICES)
        gate_up[some], down[some] = mixed.deinterleave(next(values)), next(values)
    return gate_up, down


@torch.no_grad()
def oracle(
    engine: Any, config: dict[str, Any], experts: Sequence[tuple[torch.Tensor, torch.Tensor]], dtype: Any
) -> Any:
    """transformers' model in `dtype` with the engine's parameters."""
    from transformers import Inkling2ForCausalLM, Inkling2TextConfig

    settings = Inkling2TextConfig(**config)
    settings._attn_implementation = settings._experts_implementation = "eager"
    with torch.device("meta"):
        model = Inkling2ForCausalLM._from_config(settings, dtype=dtype)
    own, state = model.state_dict(), {}
    for name, parameter in engine.named_parameters():
        if ".mlp.experts." not in name:
            state[name] = parameter.detach().to(own[name].dtype, copy=True).contiguous()
    assert {name for name in own if ".mlp.experts." not in name} == state.keys()
    model.load_state_dict(state, strict=False, assign=True)
    for layer, weights in zip(model.model.layers, experts, strict=True):
        layer.mlp.experts = SharedExperts(*weights, layer.mlp.experts.act_fn)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    torch.backends.cudnn.allow_tf32 = False
    return model.eval()


@contextlib.contextmanager
def launched_late() -> Iterator[None]:
    """Triton's kernels start when the one before has ended, whatever they ask for."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def late(self: Any, *arguments: Any, **options: Any) -> Any:
        return run(self, *arguments, **{name: value for name, value in options.items() if name != "launch_pdl"})

    with mock.patch.object(JITFunction, "run", late):
        yield


class Outcome:
    """What a step computes and leaves in the pages, which begin as they were."""

    def __init__(self, step: Step) -> None:
        self.step = step
        owners = step.runner.compilation_config.static_forward_context.values()
        self.pages = [owner.kv_cache for owner in owners]
        self.before = [pages.clone() for pages in self.pages]

    def of(self, run: Any) -> list[torch.Tensor]:
        """Hidden states, logits and every page."""
        for pages, before in zip(self.pages, self.before, strict=True):
            pages.copy_(before)
        results = run()
        return [tensor.clone() for tensor in (*results, *self.pages)]

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_TH = self.step.hidden()
        return hidden_TH, self.step.runner.model.compute_logits(hidden_TH)

    def captured(self) -> Any:
        """`compute` as the replay of a graph, whose results are wiped before."""
        self.compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = self.compute()

        def replay() -> tuple[torch.Tensor, ...]:
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
            return results

        return replay


class TestFullWidth:
    @pytest.fixture(scope="class")
    def gpu(self, directory: Path) -> Iterator[Watched]:
        arguments: dict[str, Any] = {
            "dtype": "bfloat16", "load_format": "dummy", "max_model_len": 4096, "max_num_seqs": 8,
            "max_num_batched_tokens": 4096, "kv_cache_memory_bytes": 4 << 30, "cudagraph_capture_sizes": [1, 8],
        }  # fmt: skip
        with engine(directory, **arguments) as watched:
            yield watched

    @pytest.fixture(scope="class")
    def models(self, gpu: Watched, directory: Path) -> tuple[Any, Any]:
        """transformers in float32 and in bfloat16, on expert values that both share."""
        layers = gpu.model.model.layers
        assert [layer.mlp.experts.expert_format for layer in layers] == ["nvfp4", "mxfp8"]
        experts = [own_experts(layer.mlp.experts, index) for index, layer in enumerate(layers)]
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        rounded = oracle(gpu.model, config, experts, torch.bfloat16)
        # A release stores in bfloat16 what transformers holds so; what was drawn is finer where the engine has float32.
        stored = rounded.state_dict()
        with torch.no_grad():
            for name, parameter in gpu.model.named_parameters():
                if ".mlp.experts." not in name:
                    parameter.copy_(stored[name])
        return oracle(gpu.model, config, experts, torch.float32), rounded

    def test_runner(self, gpu: Watched) -> None:
        assert is_second_runner(gpu.runner) and not gpu.model.model.kernels.fell_back
        kinds = [layer.self_attn.kind for layer in gpu.model.model.layers]
        assert [(kind.window, kind.rel_extent, kind.num_heads, kind.head_dim) for kind in kinds] == [
            (1024, 1024, 48, 128), (None, 1024, 48, 128),
        ]  # fmt: skip

    def test_a_long_prompt_chunks_decoding_and_a_batch(self, gpu: Watched, models: tuple[Any, Any]) -> None:
        [long] = random_prompts((3000,), num_tokens=VOCABULARY)
        batch = random_prompts((1, 7, 130, 260, 515, 1023, 1024, 1100), seed=1, num_tokens=VOCABULARY)
        modes = {
            "whole prompt": ([long], 0, 8),
            "chunks of 700": ([long], 700, 8),
            "batch of 8": (batch, 0, 16),
            "batch of 8 in chunks": (batch, 300, 16),
        }
        for what, (prompts, chunk, tokens) in modes.items():
            gpu.forget()
            mixed_before, replays = gpu.mixed, gpu.replays
            with gpu.in_chunks(chunk):
                outputs = generate(gpu.llm, prompts, max_tokens=tokens, logprobs=0, prompt_logprobs=0)
            assert gpu.replays > replays
            assert gpu.mixed > mixed_before or what != "batch of 8 in chunks"
            errors = Errors()
            errors.add(*models, prompts, outputs)
            errors.show(f"full width, {what}")
            errors.check()
        # Decoding far beyond window and extent, on pages that a prefix hit brought.
        gpu.forget()
        generate(gpu.llm, [long], max_tokens=1)
        outputs = generate(gpu.llm, [[*long, 5]], max_tokens=64, logprobs=0)
        assert outputs[0].num_cached_tokens > 2900
        errors = Errors()
        errors.add(*models, [[*long, 5]], outputs)
        errors.show("full width, 64 tokens after 3,001")
        errors.check(2.0, 3.0)

    @torch.inference_mode()
    @pytest.mark.parametrize("name", STEPS)
    def test_a_step_launched_early_is_the_step_launched_late(self, gpu: Watched, name: str) -> None:
        """Every bit of it: kernels that start before those before them have ended read nothing too early."""
        requests = STEPS[name]
        fill_pages(gpu.runner)
        ids = torch.randint(VOCABULARY, (sum(new for _, new in requests),), generator=torch.Generator().manual_seed(3))
        outcome = Outcome(build(gpu.runner, requests, ids))
        with launched_late():
            wanted = outcome.of(outcome.compute)
        assert all(bool(tensor.isfinite().all()) for tensor in wanted)
        assert any(not torch.equal(*pair) for pair in zip(wanted[2:], outcome.before, strict=True))
        replay = outcome.captured()
        for _ in range(REPLAYS):
            assert all(torch.equal(*pair) for pair in zip(outcome.of(replay), wanted, strict=True))
        gpu.forget()

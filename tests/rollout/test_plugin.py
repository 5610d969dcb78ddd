"""Registration and its self-check, page geometry, start-up refusals, checkpoints that do not fit, live reload."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Inkling2TextConfig

from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import Checkpoint
from inkling_rl.checkpoint.tiny import tiny_config, write_tiny
from inkling_rl.formats.errors import FormatError
from rollout.plugin.shape import EngineError, ModelShape, check_engine
from tests.rollout.engines import differences, engine, generate, largest_change, oracle, random_prompts


def test_registration_is_idempotent_and_checked() -> None:
    from rollout.plugin import compat, lora, register, registration, seeds

    register()
    register()
    registration.check_active()
    assert lora.is_installed() and seeds.is_installed()
    saved = compat.MODEL_ARCH_CONFIG_CONVERTORS.pop(compat.MODEL_TYPES[0])
    try:
        with pytest.raises(EngineError, match=r"steps missing: config conversion\. "):
            registration.check_active()
    finally:
        compat.MODEL_ARCH_CONFIG_CONVERTORS[compat.MODEL_TYPES[0]] = saved
    registration.check_active()


def test_the_entry_point_leads_to_register() -> None:
    from importlib.metadata import entry_points

    [entry] = [point for point in entry_points(group="vllm.general_plugins") if point.name == "inkling2"]
    assert entry.value == "rollout.plugin:register"
    import rollout.plugin.registration  # noqa: F401 - a submodule called `register` would replace the function

    assert callable(entry.load())


def test_the_flags_given_to_vllm_are_those_of_the_class() -> None:
    from vllm.model_executor.models.registry import _ModelInfo

    from rollout.plugin.model import Inkling2ForCausalLM
    from rollout.plugin.registration import MODEL_CLASS, MODEL_MODULE, KnownModel

    known = KnownModel(MODEL_MODULE, MODEL_CLASS)
    assert known.inspect_model_cls() == _ModelInfo.from_model_cls(Inkling2ForCausalLM)
    assert known.load_model_cls() is Inkling2ForCausalLM


def test_lora_check_is_lifted_for_inkling_2_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.lora import LoRAConfig

    from rollout.plugin import compat

    monkeypatch.delenv(compat.LORA_CHECK_ENV, raising=False)
    compat.allow_lora()
    ours = LoRAConfig()
    ours.verify_with_model_config(SimpleNamespace(architectures=["Inkling2ForCausalLM"], dtype=torch.bfloat16))
    assert ours.lora_dtype is torch.float32
    with pytest.raises(ValueError, match="INKLING_MULTIMEM_AR"):
        LoRAConfig().verify_with_model_config(
            SimpleNamespace(architectures=["InklingForCausalLM"], dtype=torch.bfloat16)
        )


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_pages_have_one_size_and_blocks_are_powers_of_two(block_size: int) -> None:
    from rollout.plugin.paging import PageGeometry

    for token_bytes in (
        {"full": 256, "sliding": 512, "conv": 3840},  # tiny, float32
        {"full": 4096, "sliding": 20480, "conv": 135168},  # Inkling 2 Small, bfloat16
        {"sliding": 512, "conv": 3840},  # no full layer
    ):
        geometry = PageGeometry.fit(block_size, token_bytes)
        for kind, size in token_bytes.items():
            block = geometry.blocks[kind]
            assert block >= 1 and block & (block - 1) == 0
            assert block * size <= geometry.page_bytes < 2 * block * size
        assert geometry.page_bytes == geometry.blocks[next(iter(token_bytes))] * next(iter(token_bytes.values()))


def settings(**changes: Any) -> Any:
    """As much of a vLLM configuration as `check_engine` reads."""
    values = {
        "dtype": torch.float32,
        "cache_dtype": "auto",
        "block_size": 32,
        "tp": 1,
        "pp": 1,
        "quantization": None,
    } | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=values["dtype"], quantization=values["quantization"]),
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"], block_size=values["block_size"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=values["tp"], pipeline_parallel_size=values["pp"]),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float16}, "dtype must be float32 or bfloat16"),
        ({"block_size": 48}, "block_size must be a power of two of 16 or more"),
        ({"block_size": 8}, "block_size must be a power of two of 16 or more"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype must be auto or bfloat16"),
        ({"quantization": "fp8"}, "quantization must be left unset"),
        ({"tp": 2}, "tensor_parallel_size x pipeline_parallel_size must be 1 x 1"),
    ],
)
def test_unsupported_engine_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    check_engine(settings())
    with pytest.raises(EngineError, match=message):
        check_engine(settings(**changes))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("head_dim", 24, "head_dim must be one of"),
        ("swa_head_dim", 8, "swa_head_dim must be one of"),
        ("swa_num_attention_heads", 13, "swa_num_attention_heads must be a multiple of the 2"),
        ("d_rel", 4, "d_rel must be a multiple of 16"),
        ("moe_intermediate_size", 40, "moe_intermediate_size must be a multiple of 16"),
        ("conv_kernel_size", 3, "conv_kernel_size must be 4"),
        ("scoring_func", "softmax", "scoring_func must be sigmoid"),
    ],
)
def test_unsupported_models_are_refused(key: str, value: Any, message: str) -> None:
    text = tiny_config()["text_config"]
    assert ModelShape.from_config(Inkling2TextConfig(**text)).hidden_size == 128
    with pytest.raises(EngineError, match=message):
        ModelShape.from_config(Inkling2TextConfig(**(text | {key: value})))


def test_float16_is_refused_by_the_engine_itself(tiny_checkpoint: Path) -> None:
    with pytest.raises(EngineError, match="dtype must be float32 or bfloat16"), engine(tiny_checkpoint, dtype="half"):
        pass


# ---- checkpoints that do not fit -------------------------------------------------------------------------------------


def edit(directory: Path, tensor: str, change: Callable[[torch.Tensor], torch.Tensor | None], new: str = "") -> None:
    """Change, rename or drop one stored tensor, keeping the index consistent."""
    index_file = directory / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    file = directory / index["weight_map"].pop(tensor)
    tensors = load_file(file)
    changed = change(tensors.pop(tensor))
    if changed is not None:
        tensors[new or tensor] = changed
        index["weight_map"][new or tensor] = file.name
    save_file(tensors, file)
    index_file.write_text(json.dumps(index))


NORM = "model.llm.layers.1.attn_norm.weight"
SCALE = "model.llm.layers.0.mlp.experts.w2_weight_scale"
DENOMINATOR = "model.llm.layers.0.mlp.experts.w13_weight_outer_scale_denominator"
BROKEN_TENSORS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "missing": (NORM, lambda t: None, ""),
    "extra": (NORM, lambda t: t, "model.llm.layers.1.attn_nrom.weight"),
    "misshapen": (NORM, lambda t: t[:64].clone(), ""),
    "no companion": (SCALE, lambda t: None, ""),
    "foreign recipe": (DENOMINATOR, lambda t: t * 2, ""),
}


@pytest.fixture
def copied(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


@pytest.mark.parametrize("kind", BROKEN_TENSORS)
def test_a_checkpoint_that_does_not_fit_stops_the_start(copied: Path, kind: str) -> None:
    name, change, new = BROKEN_TENSORS[kind]
    edit(copied, name, change, new)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")), engine(copied):
        pass


def test_a_wrong_format_tag_stops_the_start(copied: Path) -> None:
    file = copied / "hf_quant_config.json"
    quant = json.loads(file.read_text())
    layers = quant["quantization"]["quantized_layers"]
    layers["model.llm.layers.0.mlp.experts"] = layers["model.llm.layers.5.mlp.experts"]
    file.write_text(json.dumps(quant))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts"), engine(copied):
        pass


class OneParameter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Module()
        self.norm.weight = torch.nn.Parameter(torch.zeros(4))


def test_the_loader_accounts_for_every_tensor() -> None:
    from rollout.plugin import loader

    ones = torch.ones(4)
    with pytest.raises(CheckpointError, match=r"missing: norm\.weight"):
        loader.load(OneParameter(), [("model.visual.proj_in.weight", ones), ("model.dspark.fc.weight", ones)])
    with pytest.raises(CheckpointError, match=r"other\.weight must be a tensor"):
        loader.load(OneParameter(), [("other.weight", ones)])
    with pytest.raises(CheckpointError, match=r"norm\.weight must have shape \[4\]; got \[3\]"):
        loader.load(OneParameter(), [("norm.weight", ones[:3])])
    model = OneParameter()
    assert loader.load(model, [("norm.weight", ones)]) == {"norm.weight"}
    assert torch.equal(model.norm.weight, ones)


def test_expert_codes_wait_for_their_companions(tiny_checkpoint: Path) -> None:
    from rollout.plugin import loader

    checkpoint = Checkpoint.open(tiny_checkpoint)
    prefix = "model.llm.layers.0.mlp.experts.w13_weight"
    stored = [(name, checkpoint.tensor(name)) for name in checkpoint.shards if name.startswith(prefix)]
    expected = dict(checkpoint.iter_hf(torch.float32))["model.layers.0.mlp.experts.gate_up_proj"]
    for order in (stored, stored[::-1]):
        [(name, value)] = loader.text_weights(order, torch.float32)
        assert name == "model.layers.0.mlp.experts.gate_up_proj" and torch.equal(value, expected)
    with pytest.raises((FormatError, CheckpointError), match=r"layers\.0\.mlp\.experts"):
        list(loader.text_weights(stored[1:], torch.float32))
    with pytest.raises(FormatError, match="w13_weight"):
        list(loader.text_weights([pair for pair in stored if not pair[0].endswith("amax")], torch.float32))


def reload(llm: Any, model: Any, poison: bool = False) -> None:
    """Replace the weights of a running engine, or fill it with NaN, and forget cached prefixes."""
    weights = [(name, value * (math.nan if poison else 1.0)) for name, value in model.state_dict().items()]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
    llm.reset_prefix_cache()


def test_transformers_names_load_and_a_live_reload_is_exact(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A under transformers' names, then B and A again in place: parameters keep their layout and meaning."""
    first, second = oracle(tiny_checkpoint), oracle(write_tiny(tmp_path / "b", seed=9))
    plain = tmp_path / "plain"
    plain.mkdir()
    # Plain transformers names, text class, float32 experts: what a trainer's state dict looks like.
    save_file({name: value.clone() for name, value in first.state_dict().items()}, plain / "model.safetensors")
    config = first.config.to_dict() | {"architectures": ["Inkling2ForCausalLM"]}
    (plain / "config.json").write_text(json.dumps(config, default=str))
    prompts = random_prompts((20, 45), seed=10)
    with engine(plain, skip_tokenizer_init=True, enable_lora=True, max_lora_rank=8) as llm:
        before = generate(llm, prompts)
        assert max(differences(first, prompts, before)) < 1e-4
        reload(llm, second)
        assert max(differences(second, prompts, generate(llm, prompts))) < 1e-4
        # NaN keys and values stay behind in pages; what no query may see must not reach a result.
        reload(llm, second, poison=True)
        generate(llm, prompts)
        reload(llm, first)
        assert max(differences(first, prompts, generate(llm, prompts))) < 1e-4
        assert largest_change(before, generate(llm, prompts)) <= 1e-5

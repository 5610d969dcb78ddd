"""Reading a checkpoint: equal to transformers through its own name mapping, and every damage named in one message."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.layout import CheckpointError
from inkling_rl.checkpoint.reader import Checkpoint, resolve
from inkling_rl.checkpoint.writer import export_release
from inkling_rl.formats.errors import FormatError


def strict_model(hf_config: Any, state: dict[str, torch.Tensor]) -> Any:
    from transformers import Inkling2ForCausalLM

    model = Inkling2ForCausalLM(hf_config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data = tensor.data.to(state[name].dtype)
    model.load_state_dict(state, strict=True)
    return model.eval()


@torch.no_grad()
def logits(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    return model(token_ids).logits.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_mean_what_transformers_takes_them_to_mean(
    tiny: Checkpoint, hf_config: Any, token_ids: torch.Tensor, dtype: torch.dtype
) -> None:
    """transformers' own mapping of the release names, against our `iter_hf` loaded strictly."""
    from transformers import Inkling2ForCausalLM

    ours = strict_model(hf_config, dict(tiny.iter_hf(dtype)))
    theirs, info = Inkling2ForCausalLM.from_pretrained(
        None, config=hf_config, state_dict=dict(tiny.iter_text(dtype)), dtype=dtype, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert {k: v.dtype for k, v in ours.state_dict().items()} == {k: v.dtype for k, v in theirs.state_dict().items()}
    assert logits(ours, token_ids).equal(logits(theirs.eval(), token_ids))


def test_what_transformers_saves_reads_back_equal(
    tiny: Checkpoint, hf_config: Any, tmp_path: Path, token_ids: torch.Tensor
) -> None:
    state = dict(tiny.iter_hf(torch.bfloat16))
    strict_model(hf_config, state).save_pretrained(tmp_path)
    saved = Checkpoint.open(tmp_path)
    saved.check()
    assert saved.quant_config is None and saved.expert_format(5) == "bf16"
    again = dict(saved.iter_hf(torch.bfloat16))
    assert set(again) == set(state)
    assert all(again[name].equal(value) and again[name].dtype == value.dtype for name, value in state.items())


def test_a_bfloat16_release_loads_from_its_directory(
    tiny: Checkpoint, hf_config: Any, tmp_path: Path, token_ids: torch.Tensor
) -> None:
    """As trainer and oracle are told to: only the vision tower and the draft are unexpected."""
    from transformers import Inkling2ForCausalLM

    state = dict(tiny.iter_hf(torch.bfloat16))
    extra = {name: tiny.tensor(name) for name in tiny.shards if not name.startswith(layout.TEXT_PREFIX)}
    path = export_release(tmp_path / "bf16", tiny.config, None, state, extra)
    model, info = Inkling2ForCausalLM.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(name.startswith(("model.visual.", "model.dspark.")) for name in info["unexpected_keys"])
    assert logits(model.eval(), token_ids).equal(logits(strict_model(hf_config, state), token_ids))


def test_dtypes_and_shapes(tiny: Checkpoint) -> None:
    text = dict(tiny.iter_text(torch.bfloat16))
    assert list(text) == list(layout.text_tensors(tiny.config))
    for name, spec in layout.text_tensors(tiny.config).items():
        assert tuple(text[name].shape) == spec.shape
        assert text[name].dtype == (torch.float32 if layout.is_float32(name) else torch.bfloat16), name
    full = dict(tiny.iter_text(torch.float32))
    assert all(value.dtype == torch.float32 for value in full.values())
    assert [tiny.expert_format(i) for i in range(6)] == ["nvfp4"] * 5 + ["mxfp8"]
    assert tiny.text_config["hidden_size"] == 128


def test_a_tensor_is_a_copy(tiny: Checkpoint) -> None:
    name = "model.llm.norm.weight"
    before = tiny.tensor(name)
    tiny.tensor(name).zero_()
    dict(tiny.iter_text(torch.bfloat16))[name].zero_()
    assert tiny.tensor(name).equal(before) and bool(before.any())


@pytest.mark.parametrize("layer", [1, 5])
@pytest.mark.parametrize("matrix", layout.EXPERT_MATRICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_one_by_one_are_those_of_the_layer(
    layer: int, matrix: str, dtype: torch.dtype, tiny: Checkpoint
) -> None:
    whole = dict(tiny.iter_text(dtype))[f"{layout.experts_prefix(layer)}.{matrix}"]
    assert all(tiny.expert(layer, matrix, e, dtype).equal(whole[e]) for e in range(16))
    starts, groups = zip(*tiny.iter_experts(layer, matrix, dtype, group=7), strict=True)
    assert starts == (0, 7, 14) and torch.cat(groups).equal(whole)
    with pytest.raises(CheckpointError, match="expert must be 0 to 15; got 16"):
        tiny.expert(layer, matrix, 16, dtype)
    with pytest.raises(CheckpointError, match=r"must hold model\.llm\.layers\.9\.mlp\.experts"):
        tiny.expert(9, matrix, 0, dtype)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Apply `change` to all tensors and write them as one file without an index."""
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (path / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def retag(path: Path, layer: int, algo: str, group_size: int) -> None:
    quant = json.loads((path / "hf_quant_config.json").read_text())
    entry = {"quant_algo": algo, "group_size": group_size}
    quant["quantization"]["quantized_layers"][layout.experts_prefix(layer)] = entry
    (path / "hf_quant_config.json").write_text(json.dumps(quant))


EXPERT = "model.llm.layers.2.mlp.experts.w13_weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        lambda p: rewrite(p, lambda t: t.pop("model.llm.layers.1.attn.wr_du.weight")),
        r"layers\.1\.attn\.wr_du\.weight must be present; it is missing \(1 in all\)",
    ),
    "renamed": (
        lambda p: rewrite(p, lambda t: t.update({"model.llm.final_norm.weight": t.pop("model.llm.norm.weight")})),
        r"model\.llm\.norm\.weight must be present.*Stored instead: model\.llm\.final_norm\.weight",
    ),
    "companion missing": (
        lambda p: rewrite(p, lambda t: t.pop(f"{EXPERT}_amax")),
        r"layers\.2\.mlp\.experts\.w13_weight_amax must be present",
    ),
    "extra": (
        lambda p: rewrite(p, lambda t: t.update({"model.llm.layers.1.attn.q_norm.weight": torch.ones(16)})),
        r"q_norm\.weight must not be present.*The nearest name is: model\.llm\.layers\.1\.",
    ),
    "misshapen": (
        lambda p: rewrite(p, lambda t: t.update({"model.llm.layers.0.attn.rel_logits_proj.proj": torch.ones(16, 16)})),
        r"rel_logits_proj\.proj must have shape \[16, 8\]; got \[16, 16\]",
    ),
    "dtype": (
        lambda p: rewrite(p, lambda t: t.update({"model.llm.layers.0.mlp.gate.bias": torch.ones(16).bfloat16()})),
        r"gate\.bias must have dtype float32; got bfloat16",
    ),
    "tag says MXFP8": (lambda p: retag(p, 2, "MXFP8", 32), r"layers\.2\.mlp\.experts\.w13_weight_amax must not be"),
    "tag says NVFP4": (lambda p: retag(p, 5, "NVFP4", 16), r"layers\.5\.mlp\.experts\.w13_weight_amax must be present"),
    "unknown tag": (lambda p: retag(p, 2, "INT4", 16), "must be NVFP4 or MXFP8; got 'INT4'"),
    "denominator": (
        lambda p: rewrite(p, lambda t: t.update({f"{EXPERT}_outer_scale_denominator": torch.tensor(1000.0)})),
        r"w13_weight_outer_scale_denominator must be 1536 or 2688; got 1000",
    ),
    "no quantisation file": (
        lambda p: (p / "hf_quant_config.json").unlink(),
        r"w13_weight_amax must not be present; config\.json and hf_quant_config\.json describe no such tensor",
    ),
    "broken json": (lambda p: (p / "config.json").write_text("{"), r"config\.json must be readable JSON"),
    "json list": (lambda p: (p / "config.json").write_text("[]"), r"must hold a JSON object; got list"),
    "no config": (lambda p: (p / "config.json").unlink(), r"must be a checkpoint directory with a config\.json"),
    "no shard": (
        lambda p: (p / "model-00002-of-00002.safetensors").unlink(),
        r"model-00002-of-00002\.safetensors must be present; it is missing",
    ),
    "torn shard": (
        lambda p: (p / "model-00002-of-00002.safetensors").write_bytes(
            (p / "model-00002-of-00002.safetensors").read_bytes()[:-100]
        ),
        r"model-00002-of-00002\.safetensors must be a readable safetensors file",
    ),
    "index of other shards": (
        lambda p: (p / "model-00002-of-00002.safetensors").write_bytes(
            (p / "model-00001-of-00002.safetensors").read_bytes()
        ),
        r"must hold model\.\S+, as model\.safetensors\.index\.json says; it does not",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_with_one_message(damage: str, tiny_path: Path, tmp_path: Path) -> None:
    apply, message = DAMAGES[damage]
    path = tmp_path / "damaged"
    shutil.copytree(tiny_path, path)
    apply(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(path).check()
    assert "\n" not in str(caught.value)


def test_an_opened_checkpoint_travels_between_processes(tiny: Checkpoint) -> None:
    before = tiny.tensor("model.llm.norm.weight")
    assert pickle.loads(pickle.dumps(tiny)).tensor("model.llm.norm.weight").equal(before)


def test_a_whole_checkpoint_passes(tiny: Checkpoint) -> None:
    tiny.check()


def test_asking_for_what_is_not_there(tiny: Checkpoint, tiny_path: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"must hold model\.llm\.norms\.weight.*nearest name is: model\.llm\.norm"
    ):
        tiny.tensor("model.llm.norms.weight")
    shutil.copytree(tiny_path, tmp_path / "damaged")
    rewrite(tmp_path / "damaged", lambda t: t.pop(f"{EXPERT}_amax"))
    with pytest.raises(FormatError, match="must come with"):
        dict(Checkpoint.open(tmp_path / "damaged").iter_text(torch.bfloat16))


def test_builtin_names_resolve_to_package_data() -> None:
    with pytest.raises(CheckpointError, match=r"must be a built-in checkpoint \(.*\); got builtin:no-such-model"):
        resolve("builtin:no-such-model")


def test_opening_and_naming_load_no_torch(tiny_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from inkling_rl.checkpoint.reader import resolve; from inkling_rl.checkpoint import layout; "
        f"resolve({str(tiny_path)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Bytes against other people's libraries: equal where they mean the same, and each difference counted and explained.

The live ones (ModelOpt, torchao, ml_dtypes) run in a process of their own, see `oracles`; compressed-tensors comes with
vLLM. Transformer Engine's and fouroversix's references are recorded, see `record_vectors`. vLLM's own MXFP8 is met in
`tests/rollout/test_format_oracles.py`.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from inkling_rl.formats import mxfp8, nvfp4
from inkling_rl.formats.reference import mxfp8 as reference_mxfp8
from inkling_rl.formats.reference import nvfp4 as reference
from tests.inkling_rl import oracles
from tests.inkling_rl.format_cases import e2m1_ties, e4m3_ties, mxfp8_cases
from tests.inkling_rl.record_vectors import FOLDER

Answers = dict[str, dict[str, oracles.Bytes]]
E4M3 = reference.e4m3_values(torch.arange(0x7F, dtype=torch.uint8)).double()


def mxfp8_weights() -> dict[str, torch.Tensor]:
    return {name: weight.flatten(0, 1) for name, weight in mxfp8_cases().items()}


def nvfp4_weights() -> dict[str, torch.Tensor]:
    """Forty maxima, because whether two orders of operations differ depends on the maximum; and the edges."""
    g = torch.Generator().manual_seed(5)
    edges = torch.randn(8, 64, generator=g)
    edges[1], edges[2], edges[3, :16] = 0.0, edges[2] * 1e-6, -0.0
    edges[4, 0] = -0.0
    return {str(i): torch.randn(64, 1024, generator=g).bfloat16() for i in range(40)} | {"edges": edges}


def cast_values() -> torch.Tensor:
    """Every finite bfloat16, every tie of E2M1 and E4M3, and their float32 neighbours."""
    values = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    scale_ties = ((E4M3[1:] + E4M3[:-1]) / 2).float()
    ties = torch.cat([e2m1_ties().flatten(), e4m3_ties().flatten().abs(), scale_ties, E4M3.float()])
    near = torch.cat([ties, torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)])
    both = torch.cat([values, near])
    return torch.cat([both, -both])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    if not (oracles.DIRECTORY / "modelopt").is_dir():
        pytest.skip(f"the oracles are not in {oracles.DIRECTORY}: run `make oracles`")
    gaussian = {str(i): w for i, w in nvfp4_weights().items() if i in ("0", "1", "2")}
    rounding = {f"torchao-mxfp8-{mode}": gaussian for mode in ("floor", "even", "ceil")}
    every = {"modelopt-mxfp8": mxfp8_weights(), "torchao-mxfp8-rceil": mxfp8_weights()} | rounding
    every |= {"modelopt-nvfp4": nvfp4_weights(), "torchao-nvfp4": nvfp4_weights(), "ml-dtypes": {"": cast_values()}}
    return oracles.ask(every, tmp_path_factory.mktemp("oracles"))


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2)


def per_block(elements: torch.Tensor, size: int) -> torch.Tensor:
    return elements.unflatten(-1, (-1, size)).any(-1)


def above_boundary(weight: torch.Tensor) -> torch.Tensor:
    """Blocks whose maximum lies one float32 step above 1.75 * 2^k: the scale must go up, and float32's log2 of their
    quotient by 448 rounds to the integer below."""
    bits = weight.float().unflatten(-1, (-1, 32)).abs().amax(-1).view(torch.int32)
    return (bits & 0x7FFFFF) == 0x600001


@pytest.mark.parametrize("oracle", ["modelopt-mxfp8", "torchao-mxfp8-rceil"])
def test_mxfp8_with_the_ceiling_scale(answers: Answers, oracle: str) -> None:
    """Equal but for two kinds of blocks.

    Both libraries take a float32 `log2`, which misses the step where a maximum lies one float32 step above 1.75 * 2^k:
    they then saturate that value. No bfloat16 lies there. torchao stores zeros under scale byte 0 (2^-127).
    """
    num_above = num_smallest = 0
    for case, weight in mxfp8_weights().items():
        m = mxfp8.quantize(weight)
        codes, scales = answers[oracle][case]
        other_scales, other_codes = scales != m.scales, per_block(codes != m.codes, 32)
        above = above_boundary(weight)
        assert not (other_scales & ~above).any(), case
        assert (m.scales[other_scales] == scales[other_scales] + 1).all()
        smallest = (m.scales == 0) & (oracle == "torchao-mxfp8-rceil")
        assert not (other_codes & ~other_scales & ~smallest).any(), case
        assert not (codes.unflatten(-1, (-1, 32))[smallest] & 0x7F).any()
        assert weight.dtype != torch.bfloat16 or not other_scales.any()
        num_above += int(other_scales.sum())
        num_smallest += int((other_codes & smallest & ~other_scales).sum())
    # Of 254 exponents: 7 have no smaller scale to take, and near 2^0 float32 resolves the step.
    assert num_above == 239
    assert (num_smallest > 0) == (oracle == "torchao-mxfp8-rceil")


@pytest.mark.parametrize(
    ("mode", "differs"),
    [
        ("floor", lambda mantissa: mantissa > 0x600000),  # the block saturates
        ("even", lambda mantissa: (mantissa > 0x600000) & (mantissa < 0x780000)),  # saturates unless it rounds to 2
        ("ceil", lambda mantissa: (mantissa > 0) & (mantissa <= 0x600000)),  # a bit is wasted
    ],
)
def test_mxfp8_with_another_rounding_of_the_scale(answers: Answers, mode: str, differs) -> None:
    """torchao's other modes differ exactly where the mantissa of the block's maximum says so: not our format."""
    for case, (_, scales) in answers[f"torchao-mxfp8-{mode}"].items():
        weight = nvfp4_weights()[case]
        bits = weight.float().unflatten(-1, (-1, 32)).abs().amax(-1).view(torch.int32)
        ours = mxfp8.quantize(weight).scales
        assert ((scales != ours) == differs(bits & 0x7FFFFF)).all()
        assert 0.1 < (scales != ours).float().mean() < 0.9


def test_compressed_tensors_bumps_the_scale_at_1_75() -> None:
    """It rounds the maximum to one bit of mantissa first, so that 1.75 * 2^k, which fits, takes the next scale."""
    module = pytest.importorskip("compressed_tensors.quantization.utils.mxfp_utils")
    num_bumped = 0
    for case, weight in (mxfp8_weights() | nvfp4_weights()).items():
        if weight.dtype != torch.bfloat16:
            continue
        largest = weight.unflatten(-1, (-1, 32)).abs().amax(-1)
        ours = mxfp8.quantize(weight).scales
        usual = (ours > 0) & (ours < 247)  # beyond, it leaves the range of a byte
        theirs = module.generate_mx_scales(largest, num_bits=8)[usual]
        bumped = (largest.float().view(torch.int32)[usual] & 0x7FFFFF) == 0x600000
        assert theirs.equal(ours[usual] + bumped.float()), case
        num_bumped += int(bumped.sum())
    assert num_bumped == 386


def map_to_six(weight: torch.Tensor, scale_max: int = 448) -> nvfp4.NVFP4Tensor:
    """NVFP4 as it is without Four Over Six, from our pieces: what the libraries below have."""
    amax = weight.float().abs().max()
    base = reference.base_scale(weight.float().unflatten(-1, (-1, 16)), amax, 6 * scale_max)
    return nvfp4.quantize(weight, amax, reference._e4m3(base), scale_max)


@pytest.mark.parametrize(
    ("oracle", "num_scales", "num_codes"), [("modelopt-nvfp4", 371, 1495), ("torchao-nvfp4", 198, 1344)]
)
def test_plain_nvfp4_in_another_order_of_operations(
    answers: Answers, oracle: str, num_scales: int, num_codes: int
) -> None:
    """Both divide by a rounded outer scale, we multiply by its inverse: bytes differ at ties, and only there."""
    other_scales = other_codes = 0
    for case, weight in nvfp4_weights().items():
        if case == "edges":
            continue
        t = map_to_six(weight)
        codes, scales = answers[oracle][case]
        wrong = scales != t.scales
        amax, largest = weight.double().abs().max(), weight.double().unflatten(-1, (-1, 16)).abs().amax(-1)
        exact, low = (largest * 448 / amax)[wrong], torch.minimum(scales, t.scales)[wrong].long()
        assert ((scales.int() - t.scales.int())[wrong].abs() == 1).all()
        assert (exact / ((E4M3[low] + E4M3[low + 1]) / 2) - 1).abs().lt(2.0**-21).all()
        differ = (nibbles(codes) != nibbles(t.codes)) & ~wrong.repeat_interleave(16, -1)
        step = reference.e4m3_values(t.scales).double().repeat_interleave(16, -1) * amax / 2688
        scaled = (weight.double() / step).abs()[differ]
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.double)
        assert (scaled[:, None] / ties - 1).abs().amin(-1).lt(2.0**-21).all()
        other_scales, other_codes = other_scales + int(wrong.sum()), other_codes + int(differ.sum())
    assert (other_scales, other_codes) == (num_scales, num_codes)


@pytest.mark.parametrize(
    ("oracle", "zero_scale", "smallest_scale", "minus_zero"),
    [("modelopt-nvfp4", 0x38, 0x01, 0x0), ("torchao-nvfp4", 0x08, 0x08, 0x8)],
)
def test_edges_of_plain_nvfp4(
    answers: Answers, oracle: str, zero_scale: int, smallest_scale: int, minus_zero: int
) -> None:
    """ModelOpt: scale 1 for a zero block, none below 2^-9, -0.0 dropped. torchao: no scale below 2^-6. We store 0."""
    weight = nvfp4_weights()["edges"]
    t = map_to_six(weight)
    codes, scales = answers[oracle]["edges"]
    assert not t.scales[1].any() and (scales[1] == zero_scale).all() and not codes[1].any()
    assert not t.scales[2].any() and (scales[2] == smallest_scale).all()
    assert not t.scales[3, 0].any() and not nibbles(t.codes)[3, :16].any()
    assert set(nibbles(codes)[3, :16].tolist()) == {minus_zero} and scales[3, 0] == zero_scale
    assert nibbles(t.codes)[4, 0] == 8 and nibbles(codes)[4, 0] == minus_zero
    rest = [0, 5, 6, 7]
    assert scales[rest].equal(t.scales[rest]) and codes[rest].equal(t.codes[rest])


def test_compressed_tensors_packs_and_scales_plain_nvfp4_alike() -> None:
    """Codes lie alike in a byte. Scales are equal under the same global scale; their own is 1 / amax times
    2688 (torch's scalar over tensor), rounded twice, and moves a few scales where it is an ulp off."""
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    from compressed_tensors.quantization.utils import generate_gparam

    num_moved = 0
    for case, weight in nvfp4_weights().items():
        t = map_to_six(weight)
        values = reference.e2m1_values(t.codes)
        assert helpers.pack_fp4_to_uint8(values).equal(t.codes)
        assert helpers.unpack_fp4_from_uint8(t.codes, *values.shape, dtype=torch.float32).equal(values)
        zero = t.scales == 0  # there they take E4M3's epsilon, 1/8
        once, twice = torch.tensor(2688.0) / t.amax, generate_gparam(weight.float().min(), weight.float().max())
        theirs = compressed_tensors_scales(weight, once)
        assert theirs[~zero].equal(t.scales[~zero]) and (theirs[zero] == 0x20).all()
        assert bool(zero.any()) == (case == "edges")
        moved = compressed_tensors_scales(weight, twice) != theirs
        assert once != twice or not moved.any()
        num_moved += int(moved.sum())
    assert num_moved == 86


def compressed_tensors_scales(weight: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    )
    blocks = weight.float().unflatten(-1, (-1, 16))
    scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, global_scale)
    return scales.to(torch.float8_e4m3fn).view(torch.uint8)


def test_element_casts_equal_ml_dtypes(answers: Answers) -> None:
    values = cast_values()
    four, eight = answers["ml-dtypes"][""]
    assert reference._e2m1(values).equal(four)
    positive = values >= 0
    assert reference._e4m3(values)[positive].equal(eight[positive])
    # The elements of MXFP8 under scale 1 take the same cast, signs included.
    scales = torch.full((1, 1, len(values) // 32), 127, dtype=torch.uint8)
    weight = values[: 32 * scales.shape[-1]].reshape(1, 1, -1)
    codes, _, _ = reference_mxfp8.quantize(weight, scales)
    assert codes.flatten().equal(eight[: weight.numel()])


def recorded(library: str) -> list[str]:
    return list(json.loads(str(np.load(FOLDER / f"{library}.npz")["header"]))["cases"])


def read(library: str, case: str) -> tuple[torch.Tensor, nvfp4.NVFP4Tensor, torch.Tensor, torch.Tensor]:
    """Weight, our bytes, their codes one per byte, their scales."""
    archive = np.load(FOLDER / f"{library}.npz")
    scale_max = json.loads(str(archive["header"]))["cases"][case]["scale_max"]
    weight, codes, scales = (torch.from_numpy(archive[f"{case}/{part}"]) for part in ("weight", "codes", "scales"))
    weight = weight.view(torch.bfloat16) if weight.dtype == torch.uint16 else weight
    t = nvfp4.quantize(weight, float(archive[f"{case}/amax"]), scale_max=scale_max)
    return weight, t, nibbles(codes), scales


@pytest.mark.parametrize("case", [c for c in recorded("transformer_engine") if c != "squared error"])
def test_four_over_six_equals_transformer_engine(case: str) -> None:
    """Same scales, same codes, but for two conventions: codes under a zero scale (+-6 there, 0 here) and -0.0 (0 there,
    8 here); the values are equal."""
    weight, t, codes, scales = read("transformer_engine", case)
    assert scales.equal(t.scales)
    differ = codes != nibbles(t.codes)
    under_zero = (scales == 0).repeat_interleave(16, -1) & (weight != 0)
    minus_zero = (weight == 0) & torch.signbit(weight) & (scales != 0).repeat_interleave(16, -1)
    assert (differ == (under_zero | minus_zero)).all()
    assert (codes[under_zero] & 7 == 7).all() and (codes[minus_zero] == 0).all()
    expected = {"small blocks": (176, 0), "zero blocks and minus zeros": (0, 1)}.get(case, (0, 0))
    assert (int(under_zero.sum()), int(minus_zero.sum())) == expected
    if case == "where the order of the sum decides":
        assert t.scales.numel() == 96


@pytest.mark.parametrize(
    ("case", "num_blocks"),
    [
        ("gaussian bfloat16", 0),
        ("gaussian float32", 0),
        ("where the order of the sum decides", 64),
        ("small blocks", 1),
        ("zero blocks and minus zeros", 1),
        ("saturating anchor", 23),
    ],
)
def test_four_over_six_against_fouroversix(case: str, num_blocks: int) -> None:
    """Its torch reference sums in torch's order, drops -0.0, and does not saturate: what exceeds 6 by a sixth rounds to
    8, stored as -0. That is met where the scale cannot follow: subnormal scales and saturating anchors."""
    weight, t, codes, scales = read("fouroversix", case)
    differ = codes != nibbles(t.codes)
    blocks = per_block(differ, 16) | (scales != t.scales)
    assert int(blocks.sum()) == num_blocks
    values = weight.double().unflatten(-1, (-1, 16))
    if case == "where the order of the sum decides":
        ours, theirs = (error_under(values, s, t) for s in (t.scales, scales))
        assert ((ours - theirs).abs() / ours)[blocks].max() < 1e-6  # equal but for rounding: the order decides
        assert not blocks.flatten()[64:].any()
    elif case == "zero blocks and minus zeros":
        assert (weight[differ] == 0).all() and torch.signbit(weight[differ]).all() and not codes[differ].any()
    elif num_blocks:
        largest_of_candidates = values.abs().amax(-1) / step_of(map_six_scale(weight, t), t)
        assert (largest_of_candidates[blocks] >= 7).all()
        saturated = differ & (scales == t.scales).repeat_interleave(16, -1)
        assert (codes[saturated] == 8).all()
        assert ((weight.double() / step_of(t.scales, t).repeat_interleave(16, -1)).abs()[saturated] >= 7).all()
        assert t.scales[blocks].lt(8).all() if case == "small blocks" else t.scales[blocks].eq(0x7E).all()


def step_of(scales: torch.Tensor, t: nvfp4.NVFP4Tensor) -> torch.Tensor:
    return reference.e4m3_values(scales).double() * t.amax.double() / t.denominator


def map_six_scale(weight: torch.Tensor, t: nvfp4.NVFP4Tensor) -> torch.Tensor:
    base = reference.base_scale(weight.float().unflatten(-1, (-1, 16)), t.amax, t.denominator)
    return reference._e4m3(base)


def error_under(values: torch.Tensor, scales: torch.Tensor, t: nvfp4.NVFP4Tensor) -> torch.Tensor:
    """Absolute error of each block `[N, K / 16, 16]` under given scales, in double precision."""
    step = step_of(scales, t)[..., None]
    grid = torch.tensor(reference.E2M1_VALUES[:8], dtype=torch.double)
    nearest = grid[((values / step).abs()[..., None] - grid).abs().argmin(-1)]
    return (nearest * step - values.abs()).abs().sum(-1)


@pytest.mark.parametrize("library", ["transformer_engine", "fouroversix"])
def test_the_squared_error_picks_other_blocks(library: str) -> None:
    """MSE, fouroversix's and ModelOpt's default, is another recipe: 7 of these 64 blocks, all with another scale."""
    _, t, codes, scales = read(library, "squared error")
    differ = per_block(codes != nibbles(t.codes), 16)
    assert int(differ.sum()) == 7 and ((scales != t.scales) == differ).all()


def test_vectors_name_their_origin() -> None:
    for library, version in (("transformer_engine", "2.20.2"), ("fouroversix", "1.0.5")):
        header = json.loads(str(np.load(FOLDER / f"{library}.npz")["header"]))
        assert header["library"] == library and header["version"] == version
        assert header["seed"] == 20261129 and "reference" in header["call"]

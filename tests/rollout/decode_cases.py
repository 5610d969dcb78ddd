"""Inputs of decode attention for any device, and in float64 what must come out, from nothing but the equations.

A second oracle beside `rollout.kernels.reference`, which computes in float32 and could share a mistake with a kernel
that was written from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from rollout.kernels import composed, reference
from rollout.kernels.paged import PagedBatch
from rollout.kernels.units import mixture_dtype

Step = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: (tokens already there, rows of this step) per request, and the sizes of a layer."""

    step: Step
    heads: tuple[int, int] = (12, 2)
    head_dim: int = 16
    extent: int = 16
    window: int | None = None
    page: int = 16
    dtype: torch.dtype = torch.float32
    proj_dtype: torch.dtype = torch.float32
    log_scaling: tuple[float, int] | None = None
    layers_per_page: int = 1
    prepared: bool = False
    """Whether queries and `r` are as `prepare` leaves them, instead of raw."""

    padding: int = 0
    """Requests without rows and rows without a request at the end, as a captured graph has them."""

    device: str = "cpu"
    seed: int = 0
    q_clip: float = 8.0
    scale: float = 1.0
    """Multiplies queries and keys."""

    @property
    def max_queries(self) -> int:
        return max(new for _, new in self.step)


# Every request of a case is a kind of its own; few and short, because Triton's interpreter is slow.
CASES = {
    "decode": Case(step=((37, 1), (0, 1), (90, 1)), log_scaling=(0.1, 16)),
    "first tokens": Case(step=((0, 1),)),
    "verify": Case(step=((37, 8), (0, 8)), log_scaling=(0.1, 16), heads=(6, 1)),
    "fewer rows than most": Case(step=((37, 1), (20, 5), (3, 2)), heads=(6, 1)),
    "one long, some short": Case(step=((2, 1), (200, 1), (0, 1), (5, 1)), extent=48),
    "sliding": Case(step=((37, 1), (0, 1), (90, 1)), window=16),
    "sliding, verify": Case(step=((37, 8), (90, 3)), window=16, heads=(6, 1)),
    "sliding, a tile within a block": Case(step=((37, 1), (0, 2), (90, 3)), window=20, page=32),
    "window smaller than extent": Case(step=((37, 1), (90, 2)), window=8, extent=24),
    "extent smaller than window": Case(step=((37, 1), (90, 2)), window=40, extent=3),
    "window 1": Case(step=((37, 1), (90, 2)), window=1),
    "small pages, several layers": Case(step=((37, 2), (90, 2)), page=4, layers_per_page=3, window=32),
    "padded graph": Case(step=((37, 1), (64, 1)), padding=3),
    "prepared": Case(step=((37, 2), (64, 1)), prepared=True, log_scaling=(0.1, 16)),
    "no groups": Case(step=((37, 2),), heads=(3, 3), head_dim=32),
    "one key/value head": Case(step=((37, 3),), heads=(20, 1)),
    "wide heads": Case(step=((37, 2), (11, 1)), heads=(6, 1), head_dim=128, q_clip=22.6),
}


@dataclass
class Inputs:
    """Tensors of a case."""

    case: Case
    q: torch.Tensor
    r: torch.Tensor
    sink: torch.Tensor
    gate: torch.Tensor
    kv: torch.Tensor
    batch: PagedBatch
    q_scale: torch.Tensor | None
    r_scale: torch.Tensor | None
    proj: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    """Keys and values [positions, kv heads, 2 D] per request, as stored."""

    def arguments(self) -> tuple[object, ...]:
        case = self.case
        return (
            self.q, self.r, self.sink, self.gate, self.kv, self.batch, self.q_scale, self.r_scale, self.proj,
            case.q_clip, 8.0, case.window, case.log_scaling,
        )  # fmt: skip


def make(case: Case) -> Inputs:
    """Random inputs; every position that no query may see is NaN in the pool, freed blocks are block 0."""
    draw = torch.Generator(device=case.device).manual_seed(case.seed)
    num_heads, kv_heads = case.heads
    rows = sum(new for _, new in case.step) + case.padding
    randn = lambda *shape: torch.randn(shape, generator=draw, device=case.device)
    batch, num_blocks = _pages(case)
    pool = torch.full(
        (num_blocks, kv_heads, case.page, case.layers_per_page * 2 * case.head_dim), math.nan, dtype=case.dtype,
        device=case.device,
    )  # fmt: skip
    first_channel = (case.layers_per_page - 1) * 2 * case.head_dim
    kv = pool[..., first_channel : first_channel + 2 * case.head_dim]
    width = num_heads * case.head_dim
    inputs = Inputs(
        case,
        (randn(rows, width) * 2 * case.scale).to(case.dtype),
        (randn(rows, num_heads * 16) * 3).to(case.dtype),
        randn(rows, num_heads),
        randn(rows, width).to(case.dtype),
        kv,
        batch,
        None if case.prepared else 1 + 0.2 * randn(num_heads, case.head_dim),
        None if case.prepared else 1 + 0.2 * randn(num_heads, 16),
        (randn(16, case.extent) * 0.3).to(case.proj_dtype),
    )
    if case.prepared:
        _prepare(inputs)
    for request, (past, new) in enumerate(case.step):
        first = 0 if case.window is None else max(0, past - case.window + 1)
        values = randn(past + new, kv_heads, 2 * case.head_dim)
        values[..., : case.head_dim] = reference.clip_norm(values[..., : case.head_dim] * case.scale, case.q_clip)
        values = values.to(case.dtype)
        positions = torch.arange(first, past + new, device=case.device)
        slots = batch.slots_of(request, positions, case.page)
        kv[slots // case.page, :, slots % case.page] = values[first:]
        inputs.keys.append(values)
    return inputs


def _prepare(inputs: Inputs) -> None:
    """Queries and `r` become what `prepare` leaves of them, without learned scales."""
    case = inputs.case
    positions = torch.cat([*(torch.arange(past, past + new) for past, new in case.step), torch.zeros(case.padding)])
    common = (positions.to(case.device), case.log_scaling)
    ones = lambda size: torch.ones(case.heads[0], size, device=case.device)
    q_TND = composed.prepare_queries(inputs.q, ones(case.head_dim), case.q_clip, *common)
    r_TNM = composed.prepare_mixtures(inputs.r, ones(16), 8.0, *common)
    inputs.q, inputs.r = q_TND.flatten(1).to(case.dtype), r_TNM.flatten(1).to(mixture_dtype(case.dtype))


def _pages(case: Case) -> tuple[PagedBatch, int]:
    """Blocks dealt at random; those outside of the window are given back, as vLLM does: the null block stands there."""
    needed = [-(-(past + new) // case.page) for past, new in case.step]
    num_blocks = sum(needed) + 3
    order = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(case.seed)) + 1).int()
    table = torch.zeros(len(case.step) + case.padding, max(needed), dtype=torch.int32)
    for request, (past, _) in enumerate(case.step):
        dealt, order = order[: needed[request]], order[needed[request] :]
        table[request, : needed[request]] = dealt
        if case.window is not None:
            table[request, : max(0, past - case.window + 1) // case.page] = 0
    counts = torch.tensor([0, *(new for _, new in case.step), *[0] * case.padding], dtype=torch.int32)
    lengths = torch.tensor([*(past + new for past, new in case.step), *[0] * case.padding], dtype=torch.int32)
    batch = PagedBatch(counts.cumsum(0).int(), lengths, table, torch.zeros(0, dtype=torch.int64))
    return replace(batch, **{n: getattr(batch, n).to(case.device) for n in _TENSORS}), num_blocks


_TENSORS = ("query_start", "seq_lens", "block_table", "slots")


def exact(inputs: Inputs) -> torch.Tensor:
    """The equations of the model, in float64 on the inputs as they are stored; [T, N D], zeros in rows of padding."""
    case = inputs.case
    num_heads, kv_heads = case.heads
    out = torch.zeros(inputs.q.shape, dtype=torch.float64, device=inputs.q.device)
    row = 0
    for request, (past, new) in enumerate(case.step):
        stored = inputs.keys[request].double()
        k, v = stored[..., : case.head_dim], stored[..., case.head_dim :]
        k, v = (x.repeat_interleave(num_heads // kv_heads, dim=1) for x in (k, v))
        for p in range(past, past + new):
            q = inputs.q[row].double().view(num_heads, -1)
            r = inputs.r[row].double().view(num_heads, -1)
            if case.prepared:
                q, r = q * (math.sqrt(case.head_dim) * math.log(2)), r * math.log(2)
            if inputs.q_scale is not None and inputs.r_scale is not None:
                q, r = q * inputs.q_scale.double(), r * inputs.r_scale.double()
                q = q * (case.q_clip / (q.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1)
                r = r * (8.0 / (r.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1)
                if case.log_scaling is not None:
                    alpha, floor = case.log_scaling
                    tau = 1 + alpha * math.log(max((p + 1) / floor, 1))
                    q, r = q * tau, r * tau
            first = 0 if case.window is None else max(0, p - case.window + 1)
            logits = torch.einsum("nd,snd->ns", q, k[first : p + 1]) / math.sqrt(case.head_dim)
            near = min(p + 1 - first, case.extent)
            logits[:, logits.shape[1] - near :] += (r @ inputs.proj.double())[:, :near].flip(1)
            log_sum = logits.logsumexp(-1)
            attended = torch.einsum("ns,snd->nd", (logits - log_sum[:, None]).exp(), v[first : p + 1])
            attended = attended * torch.sigmoid(log_sum - inputs.sink[row].double())[:, None]
            out[row] = attended.flatten() * torch.sigmoid(inputs.gate[row].double())
            row += 1
    return out


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected||; NaN is infinite."""
    error = float((got.double() - expected).norm() / expected.norm())
    return math.inf if math.isnan(error) else error

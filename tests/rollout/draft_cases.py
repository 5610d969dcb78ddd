"""Inputs of a draft's CUDA kernels for any device, and in float64 what must come out, from nothing but the equations.

What no kernel may read is NaN: positions beyond a context, columns beside a view, pages that are nobody's; a request's
unused places in the block table name a page that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from inkling_rl.draft.reference import rotate
from rollout.kernels import triton_draft, triton_draft_head
from rollout.kernels.draft import Angles, Blocks

BF16 = torch.bfloat16
THETA = 1e6


class Draw:
    """Normal numbers."""

    def __init__(self, device: str, seed: int) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def rows(self, num_rows: int, width: int, dtype: torch.dtype, beside: int = 16) -> torch.Tensor:
        """[rows, width] out of a wider tensor, whose other columns and first row are NaN."""
        wide = torch.full((num_rows + 1, width + beside), math.nan, dtype=dtype, device=self.device)
        rows = wide[1:, :width]
        return rows.copy_(self(num_rows, width))


def angles(positions_T: torch.Tensor, size: int) -> Angles:
    rates = THETA ** (-torch.arange(size // 2, dtype=torch.float64, device=positions_T.device) / (size // 2))
    turned = positions_T.double()[:, None] * rates
    return Angles(turned.cos().float(), turned.sin().float())


def positions(num_rows: int, device: str) -> torch.Tensor:
    """From 0 to 2^20."""
    return torch.linspace(0, 2**20, num_rows, device=device).long()


def normed(x_TC: torch.Tensor, weight_D: torch.Tensor, positions_T: torch.Tensor, eps: float) -> torch.Tensor:
    """Float64 [T, N, D]."""
    x_TND = x_TC.double().unflatten(-1, (-1, len(weight_D)))
    scale = torch.rsqrt(x_TND.square().mean(-1, keepdim=True) + eps)
    return rotate(x_TND * scale * weight_D.double(), positions_T, THETA)


def worst_row(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Error over size of the worst vector of the last dimension; NaN is infinite."""
    error = ((got.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)).max()
    return math.inf if bool(error.isnan()) else float(error)


def rounding(device: str, dtype: torch.dtype) -> float:
    """Relative error of a result's rounding, and of float32 arithmetic; the interpreter cuts bfloat16 off instead."""
    return 2e-6 if dtype is torch.float32 else 2**-7 if device == "cpu" else 2**-8


def check_norm_rotate(
    device: str, dtype: torch.dtype, num_rows: int, heads: int, size: int, beside: int = 16,
    out_dtype: torch.dtype | None = None, **options: bool,
) -> None:  # fmt: skip
    """Vectors of very different sizes; one is zero, for which there is the epsilon."""
    draw = Draw(device, num_rows + heads)
    x, weight, p_T = draw.rows(num_rows, heads * size, dtype, beside), 1 + 0.2 * draw(size), positions(num_rows, device)
    x.mul_(torch.logspace(-3, 3, num_rows, device=device)[:, None])
    x[num_rows // 2, :size] = 0
    got = triton_draft.norm_rotate(x, weight, angles(p_T, size), 1e-6, out_dtype, **options)
    assert got.shape == (num_rows, heads, size) and got.is_contiguous() and got.dtype is (out_dtype or dtype)
    assert worst_row(got, normed(x, weight, p_T, 1e-6)) < rounding(device, got.dtype)


def check_store(
    device: str, dtype: torch.dtype, page_dtype: torch.dtype, num_rows: int, heads: int, size: int, page: int = 16,
    layers: int = 1, **options: bool,
) -> None:  # fmt: skip
    """Rows at random slots of pages that hold several layers; some are not stored, some have no slot at all."""
    draw = Draw(device, num_rows + page)
    x, weight, p_T = draw.rows(num_rows, 2 * heads * size, dtype), 1 + 0.2 * draw(size), positions(num_rows, device)
    num_pages = -(-2 * num_rows // page)
    pool = torch.full((num_pages, heads, page, layers * 2 * size), math.nan, dtype=page_dtype, device=device)
    first = (layers - 1) * 2 * size
    kv = pool[..., first : first + 2 * size]
    slots = torch.randperm(num_pages * page, generator=torch.Generator().manual_seed(1))[:num_rows].to(device)
    slots[1::5] = -1
    given = slots[: num_rows - 2] if num_rows > 2 else slots
    triton_draft.store_context(x, weight, angles(p_T, size), 1e-6, kv, given, **options)
    keys, values = x.split(heads * size, dim=1)
    wanted = torch.cat([normed(keys, weight, p_T, 1e-6), values.double().unflatten(-1, (heads, size))], dim=-1)
    stored = given >= 0
    places = given[stored]
    got = kv[places // page, :, places % page]
    for part, exact in zip(got.split(size, dim=-1), wanted[: len(given)][stored].split(size, dim=-1), strict=True):
        assert worst_row(part, exact) < rounding(device, page_dtype)
    kv[places // page, :, places % page] = math.nan
    assert bool(pool.isnan().all())


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of attention: tokens of context per request, and sizes."""

    lengths: tuple[int, ...]
    block: int = 7
    heads: tuple[int, int] = (12, 2)
    size: int = 16
    page: int = 16
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype | None = None
    """That of `dtype` without."""

    layers: int = 1
    """That a page holds side by side; the last is used."""

    beside: int = 16
    """Columns between rows of queries, keys and values."""

    lengths_dtype: torch.dtype = torch.int64
    scale: float = 1.0
    """Multiplies queries."""

    device: str = "cpu"
    seed: int = 0


CASES = {
    "all kinds of lengths": Case(lengths=(0, 1, 15, 16, 17, 31, 32, 33, 70), heads=(6, 1)),
    "several heads": Case(lengths=(1, 0, 70)),
    "the release's heads": Case(lengths=(40, 0), heads=(6, 1), size=128, page=64),
    "pages smaller than a tile": Case(lengths=(37, 4, 0, 5), page=4),
    "pages larger than a tile": Case(lengths=(130, 64, 63), page=64),
    "several layers, int32 lengths": Case(lengths=(37, 90), page=8, layers=3, lengths_dtype=torch.int32),
    "one long, some short": Case(lengths=(2, 700, 0, 5), heads=(2, 1)),
    "padded graph": Case(lengths=(37, 64, 0, 0, 0), heads=(6, 1)),
    "no context at all": Case(lengths=(0, 0)),
    "rows at odd distances": Case(lengths=(37, 3), beside=3),
    "bfloat16 rows over float32 pages": Case(lengths=(37, 3), dtype=BF16, page_dtype=torch.float32),
    "no groups": Case(lengths=(37, 20), heads=(3, 3), size=32),
    "forty requests": Case(lengths=tuple(7 * n % 45 for n in range(40)), heads=(2, 1), block=2),
}
GROUPS_AND_BLOCKS = ((1, 1), (8, 8), (3, 5), (8, 1), (1, 8), (2, 4), (5, 6), (7, 7), (2, 17))


@dataclass
class Inputs:
    """Tensors of a case."""

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv: torch.Tensor
    blocks: Blocks
    context: list[torch.Tensor]
    """[length, K, 2 D] per request, as stored."""

    def arguments(self) -> tuple[torch.Tensor | Blocks, ...]:
        return self.q, self.k, self.v, self.kv, self.blocks


def make(case: Case) -> Inputs:
    draw, (num_heads, kv_heads) = Draw(case.device, case.seed), case.heads
    page_dtype, size, rows = case.page_dtype or case.dtype, case.size, len(case.lengths) * case.block
    q, k, v = (draw.rows(rows, n * size, case.dtype, case.beside) for n in (num_heads, kv_heads, kv_heads))
    counts = [-(-length // case.page) for length in case.lengths]
    pool = torch.full(
        (sum(counts) + 2, kv_heads, case.page, case.layers * 2 * size), math.nan, dtype=page_dtype, device=case.device
    )
    first = (case.layers - 1) * 2 * size
    kv = pool[..., first : first + 2 * size]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(case.seed)).int()
    # A place more than any request needs.
    table, context = torch.full((len(counts), max(counts, default=0) + 1), 2**30, dtype=torch.int32), []
    for request, (length, count) in enumerate(zip(case.lengths, counts, strict=True)):
        table[request, :count], order = order[:count], order[count:]
        context.append(draw(length, kv_heads, 2 * size, dtype=page_dtype))
        p = torch.arange(length)
        kv[table[request, p // case.page].long().to(case.device), :, (p % case.page).to(case.device)] = context[-1]
    lengths = torch.tensor(case.lengths, dtype=case.lengths_dtype, device=case.device)
    q, k, v = (q * case.scale).unflatten(1, (-1, size)), k.unflatten(1, (-1, size)), v.unflatten(1, (-1, size))
    return Inputs(case, q, k, v, kv, Blocks(lengths, table.to(case.device)), context)


def exact(inputs: Inputs) -> torch.Tensor:
    """Float64 [T, N, D], on the inputs as they are stored; a key/value head at a time, for contexts are long."""
    case, out = inputs.case, torch.empty(inputs.q.shape, dtype=torch.float64, device=inputs.q.device)
    group = case.heads[0] // case.heads[1]
    for request, past in enumerate(inputs.context):
        own = slice(request * case.block, (request + 1) * case.block)
        for head in range(case.heads[1]):
            queries = slice(head * group, (head + 1) * group)
            k, v = (
                torch.cat([half.double(), block[own, head].double()])
                for half, block in zip(past[:, head].chunk(2, dim=-1), (inputs.k, inputs.v), strict=True)
            )
            weights = (inputs.q[own, queries].double() @ k.T / math.sqrt(case.size)).softmax(-1)
            out[own, queries] = weights @ v
    return out


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||; NaN is infinite."""
    error = float((got.double() - wanted).norm() / wanted.norm())
    return math.inf if math.isnan(error) else error


def check_far_pages(device: str) -> None:
    """Two pages more than 2^31 elements apart; memory between them is never touched."""
    stride, inputs = 2**31 + 64, make(Case(lengths=(20,), heads=(2, 1), page=32, dtype=BF16, device=device))
    _, heads, page, width = inputs.kv.shape
    pool = torch.empty(stride + heads * page * width, dtype=BF16, device=device)
    far = pool.as_strided((2, heads, page, width), (stride, page * width, width, 1))
    far[1] = inputs.kv[int(inputs.blocks.block_table[0, 0])]
    inputs.blocks.block_table.fill_(1)
    got = triton_draft.attention(inputs.q, inputs.k, inputs.v, far, inputs.blocks, torch.float32)
    assert relative_error(got, exact(inputs)) < 1e-2
    draw, slots = Draw(device, 0), torch.tensor([page + 3], device=device)
    x, weight, p_T = draw(1, width, dtype=BF16), 1 + 0.2 * draw(width // 2), positions(1, device)
    triton_draft.store_context(x, weight, angles(p_T, width // 2), 1e-6, far, slots)
    wanted = torch.cat([normed(x[:, : width // 2], weight, p_T, 1e-6)[:, 0], x[:, width // 2 :].double()], dim=1)
    assert worst_row(far[1, 0, 3][None], wanted) < rounding(device, BF16)


def check_rnn(device: str, dtype: torch.dtype, num_rows: int, rank: int, size: float = 1.0, **options: bool) -> None:
    """`size` multiplies what the gates are made of: from the straight part of a sigmoid to far beyond its ends."""
    draw, vocabulary = Draw(device, num_rows + rank), 50
    prepared = draw.rows(3 * num_rows, 3 * rank, torch.float32, 0).unflatten(0, (num_rows, 3))[:, 1] * size
    w1, joint = draw(vocabulary, rank, dtype=dtype), draw.rows(3 * rank, 2 * rank, dtype, 24)
    joint.mul_(size / rank**0.5)
    state, tokens = draw(num_rows, rank), (torch.arange(2 * num_rows, device=device) * 7 % vocabulary)[::2]
    found = torch.full((2, num_rows, rank), math.nan, device=device)
    triton_draft_head.rnn_step(prepared, state, tokens, w1, joint, *found, **options)
    inputs = torch.cat([state, w1[tokens].float()], dim=1).double()
    gate, candidate, output = (inputs @ joint.double().t() + prepared.double()).chunk(3, dim=1)
    wanted = torch.lerp(candidate.tanh(), state.double(), gate.sigmoid()), output.tanh()
    for got, exact in zip(found, wanted, strict=True):
        # Of sums of 2 S products of that size, not of the outcome.
        assert float((got.double() - exact).abs().max()) < 3e-6 * max(size, 1)


def check_logits(
    device: str, dtype: torch.dtype, num_rows: int, rank: int, vocabulary: int,
    place: Callable[[torch.Tensor], torch.Tensor | None] = lambda base: None, **options: bool,
) -> None:  # fmt: skip
    """Base logits as one row of every block, some of them -inf. `place` is where to write."""
    draw = Draw(device, num_rows + rank)
    base = (10 * draw(num_rows, 3, vocabulary))[:, 1]
    base[:, ::7] = -math.inf
    out, given = torch.tanh(draw(num_rows, rank)), base.clone()
    full = draw(vocabulary, rank)
    w2 = full.to(dtype)
    result = place(base)
    got = triton_draft_head.token_logits(base, out, w2, result, **options)
    assert got.dtype is torch.float32 and got.shape == base.shape
    assert (got is result) == (result is not None)
    added = out.double() @ w2.double().t()
    hidden = given.isinf()
    assert bool((got[hidden] == -math.inf).all())
    error = (got.double() - given - added)[~hidden].norm() / math.sqrt(num_rows * vocabulary)
    # Rounding of the sum of up to 256 products, and of what is added: next to nothing beside that of the weights.
    of_weights = (added - out.double() @ full.double().t()).norm() / math.sqrt(num_rows * vocabulary)
    limit = 8e-6 if dtype is torch.float32 else 2e-6 + float(of_weights) / (8 if device == "cpu" else 32)
    assert float(error) < limit, (float(error), float(of_weights))

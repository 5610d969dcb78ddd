"""What `rollout.kernels.gluon_prefill` asks of an item, 64 positions of one request: which keys, in which pages.

Layouts are those of the loads: a thread has 16 bytes of a row. No kernel of its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from rollout.kernels import units
from rollout.kernels.gluon_ring import KEYS, ROWS

LOG2_E = gl.constexpr(units.LOG2_E)
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
NARROW = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
# Prompts beside decoding requests are a later part of a step's tensors, which begins anywhere, and a table is as wide
# as an engine's longest request: the same code for all, or an engine would compile in the middle of serving.
NOT_CONSTANT = ("requests", "num_rows", "stride_table")
ANYWHERE = ("query_start", "seq_lens", "block_table")


@gluon.jit
def request_of(query_start, requests, tile, POSITIONS: gl.constexpr):
    """The same as `_request_of` of `rollout.kernels.triton_prefill`."""
    low, high = requests * 0, requests
    while low < high:
        middle = (low + high + 1) // 2
        begun = gl.load(query_start + middle) // POSITIONS + middle <= tile
        low = gl.where(begun, middle, low)
        high = gl.where(begun, high, middle - 1)
    return low


@gluon.jit
def write_zeros(place, live, stride, DIM: gl.constexpr):
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    column = gl.arange(0, 2 * DIM, layout=gl.SliceLayout(0, WIDE))
    zeros = gl.full([ROWS, 2 * DIM], 0.0, place.dtype.element_ty, WIDE)
    gl.store(place + i[:, None].to(gl.int64) * stride + column[None, :], zeros, mask=(i < live)[:, None])


@gluon.jit
def key_range(p0, end, EXTENT: gl.constexpr, WINDOW: gl.constexpr):
    """Keys from `visible` to `end - 1` are seen by some row; tiles begin at `far`, those with a bias at `near`."""
    visible = gl.maximum(p0 - WINDOW + 1, 0) if WINDOW else p0 * 0
    near = gl.maximum(gl.maximum(p0 - EXTENT + 1, 0), visible) // KEYS * KEYS
    far = visible // KEYS * KEYS if WINDOW == 0 or WINDOW > EXTENT else near
    return visible, far, near, end


@gluon.jit
def advanced(slot, phase, STAGES: gl.constexpr):
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def inside_of(first, visible, end):
    n = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, WIDE))
    return gl.minimum(gl.maximum(n, visible), end - 1)


@gluon.jit
def pages_of(pages, first, visible, end, PAGE: gl.constexpr):
    """Entries of the block table for a tile: one, or one for each position. Loaded a tile ahead."""
    if PAGE >= KEYS:
        return gl.load(pages + gl.minimum(first, end - 1) // PAGE)
    else:
        return gl.load(pages + inside_of(first, visible, end).to(gl.uint32) // PAGE)


@gluon.jit
def load_profiles(t_s, entry, first, REL: gl.constexpr):
    column = first + gl.arange(0, KEYS, layout=gl.SliceLayout(1, NARROW))
    part = gl.arange(0, 2 * REL, layout=gl.SliceLayout(0, NARROW))
    async_copy.async_copy_global_to_shared(t_s, entry + column[:, None] * (2 * REL) + part[None, :])

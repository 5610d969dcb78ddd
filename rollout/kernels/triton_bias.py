"""The relative bias of attention over many queries, made by the matrix unit and skewed through shared memory.

A query at position p adds `r_p . proj[:, p - n]` to the score of the key at n: a product [queries, d_rel] x [d_rel,
distances] read along its diagonals, because the matrix unit gives all rows the same columns and every query wants
others. What was compared, per tile of 128 query rows and 64 keys (2,048 bf16 matrix multiply-adds per cycle and
multiprocessor: scores and values cost 1,024 cycles; L2 gives about 24 bytes per cycle and multiprocessor, of which keys
and values take 32 KiB or 1,370 cycles):

- a table [tokens, heads, distance] in memory: 805 MB written and read at 8K tokens, 0.4 ms of the 0.55 allowed; its
  diagonal reads are two bytes each, too;
- the same table per program and stored skewed, 0.3 MB that stays in L2: 32 KiB more per tile through L2, 1,370 cycles;
- block-diagonal `r` against shifted profiles (as decode does it): d_rel columns per distinct position, 1,024 for a tile
  of 64 positions, eight times the product with the keys;
- FMA units: 16 multiply-adds per score are 1,024 cycles of all of them, and the profiles' loads come on top;
- `tl.gather` along a row of the product: through shared memory without padding, 8-way bank conflicts, 2-byte stores;
- **this one**: the product goes to shared memory and comes back shifted, as pairs of float16. 128 cycles of the matrix
  unit (64 new columns, 2 d_rel deep), 16 + 16 shared-memory instructions per thread: about 128 + 256 cycles of that
  pipe with its bank conflicts, no other traffic than 4 KiB of profiles per tile.

The ring. A row of shared memory is a ring of columns that a query's row fills as keys go by: 64 new columns per tile,
the other half is still there from the tile before. To read pairs, a row's shift must be even, so odd positions use the
profiles shifted by one: `r` lies in one of two blocks of columns by the parity of its row, against two blocks of
profiles. With i the number of a row's position within its tile and p0 the tile's first position, column z of row i
holds the bias of distance `p0 - z + i % 2`, and the key at n is at `z = n - 2 (i // 2)`. A row is written and read by
the same warp, because both products have the rows laid out over warps in the same way; so a barrier of the warp is
enough, and none of the block is needed.

float16 and not bfloat16: biases are of the size of 10 at the most (clips bound `r`), and three more bits keep their
error below that of the rounded queries and keys. Profiles above 65,504 in magnitude would overflow.

On a CPU (interpreter) or for float32 the ring lies in global memory; addresses are computed by the same lines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rollout.kernels import units

LOG2_E = tl.constexpr(units.LOG2_E)


def profile_table(proj_MR: torch.Tensor, padding: int, dtype: torch.dtype) -> torch.Tensor:
    """The profiles by column, [R + 2 padding, 2 M]: entry y + R + padding holds distances -y and 1 - y, or zeros.

    Args:
        proj_MR: [d_rel, extent], float32 or bfloat16, dense.
        padding: columns beyond either end that a tile may touch.
        dtype: float16, or float32 for exact products.
    """
    rel, extent = proj_MR.shape
    entries = extent + 2 * padding
    table = torch.empty(entries, 2 * rel, dtype=dtype, device=proj_MR.device)
    _table_kernel[(triton.cdiv(entries, 32),)](proj_MR.contiguous(), table, entries, padding, rel, extent, num_warps=1)
    return table


@triton.jit(do_not_specialize=["entries", "padding"])
def _table_kernel(proj, table, entries, padding, REL: tl.constexpr, EXTENT: tl.constexpr):
    entry = tl.program_id(0) * 32 + tl.arange(0, 32)[:, None]
    part = tl.arange(0, 2 * REL)[None, :]
    distance = EXTENT + padding - entry + part // REL
    inside = (distance >= 0) & (distance < EXTENT)
    value = tl.load(proj + (part % REL) * EXTENT + distance, mask=inside, other=0.0)
    tl.store(table + entry * (2 * REL) + part, value.to(table.dtype.element_ty), mask=entry < entries)


@triton.jit
def open_ring(scratch, program, ROWS: tl.constexpr, PITCH: tl.constexpr, SHARED: tl.constexpr):
    """Where the program's ring begins: an address in shared memory, in bytes, or a pointer into `scratch`.

    Triton has no name for shared memory. PTX may declare some anywhere in a function; it counts as static.
    """
    if SHARED:
        return tl.inline_asm_elementwise(
            f"{{ .shared .align 16 .b8 ring[{ROWS * PITCH * 2}]; mov.u32 $0, ring; }}",
            "=r,r", [program], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return scratch + program.to(tl.int64) * (ROWS * PITCH)


@triton.jit
def ring_rows(ring, ROWS: tl.constexpr, PITCH: tl.constexpr, SHARED: tl.constexpr):
    """Where each row of the ring begins, [ROWS]: addresses in bytes, or pointers."""
    UNIT: tl.constexpr = 2 if SHARED else 1
    return ring + tl.arange(0, ROWS) * (PITCH * UNIT)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """`a b + acc`, float32. With PRECISION "widened", for an interpreter without bfloat16, of operands made float32."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def fill_ring(
    rows, r, table, first, p0, EXTENT: tl.constexpr, PADDING: tl.constexpr, KEYS: tl.constexpr,
    RING: tl.constexpr, PRECISION: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Compute columns `first` to `first + KEYS - 1` of all rows and put them into the ring.

    `r` [ROWS, 2 M] is laid out by parity; `rows` [ROWS] says where rows begin (`ring_rows`); `first` is a multiple of
    KEYS.
    """
    column = tl.arange(0, KEYS)
    UNIT: tl.constexpr = 2 if SHARED else 1
    WIDTH: tl.constexpr = r.shape[1]
    entry = (first - p0 + EXTENT + PADDING) + column
    profiles = tl.load(table + entry[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
    values = product(r, tl.trans(profiles), None, PRECISION).to(table.dtype.element_ty)
    place = (rows + UNIT * (first & (RING - 1)))[:, None] + UNIT * column[None, :]
    _meet(first, SHARED)  # the slots may hold what the previous tile still reads
    if SHARED:
        tl.inline_asm_elementwise(
            "st.shared.b32 [$1], $3; mov.b32 $0, $3;",
            "=r,r,r,r", [place, values], dtype=tl.float16, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        tl.store(place, values)
    _meet(first, SHARED)


@triton.jit
def read_ring(
    rows, shift, like, first, KEYS: tl.constexpr, RING: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The biases of keys `first` to `first + KEYS - 1`, [ROWS, KEYS]; `shift` [ROWS] is `2 (i // 2)`.

    `like` [ROWS] is any float32 tensor that lies as rows of scores do; only its layout is used.
    """
    UNIT: tl.constexpr = 2 if SHARED else 1
    # Unmoved, or else every address becomes a variable of the loop: 16 registers and as many additions.
    start = UNIT * (unmoved(first, SHARED) - shift)
    place = rows[:, None] + ((start[:, None] + UNIT * tl.arange(0, KEYS)[None, :]) & (UNIT * RING - 1))
    if SHARED:
        unread = tl.broadcast_to(like[:, None], place.shape).to(tl.float16)
        return tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];",
            "=r,r,r,r", [place, unread], dtype=tl.float16, is_pure=False, pack=2,
        )  # fmt: skip
    else:
        return tl.load(place)


@triton.jit
def _meet(anything, SHARED: tl.constexpr):
    if SHARED:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r", [anything], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()


@triton.jit
def unmoved(value, COMPILED: tl.constexpr):
    """A scalar that the compiler may not compute ahead: what follows from it stays inside its branch."""
    if COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return value

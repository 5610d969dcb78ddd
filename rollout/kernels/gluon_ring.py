"""What `rollout.kernels.gluon_prefill` keeps in shared memory that Gluon does not know: rings of biases, and barriers.

Declared in PTX, because Gluon tells no address in shared memory, and its own barriers bring all warps of a group
together before each arrival.

The ring is that of `rollout.kernels.triton_bias` (what it holds and why it is read shifted is said there) in another
layout: a row has 256 bytes, two blocks of 64 columns, of which groups of 16 bytes are swizzled by the row. The rows of
a thread, m and m + 8 of its warp's 16, are neighbouring positions: both read the same columns, so that one address
serves four elements, and for the other block of columns only its bit 7 changes. A row is written and read by one warp.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
BY_SCORE = gl.constexpr(gl.SliceLayout(1, SCORES.value))

# A multiple of 1 KiB, from where Triton's swizzled tiles count.
RING_BYTES = gl.constexpr(2 * 64 * 256)
# Behind it: barriers, and from here on whose turn it is. What else a kernel keeps there begins 64 bytes later.
TURNS_AT = gl.constexpr(2 * 64 * 256 + 896)
OPEN = gl.constexpr("{ .shared .align 1024 .b8 ring[33792]; mov.u32 $0, ring; }")
INIT = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
    " @p mbarrier.init.shared::cta.b64 [$1], $2; mov.b32 $0, 0; }"
)
WAIT = gl.constexpr(
    "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra.uni AGAIN; mov.b32 $0, 0; }"
)
ARRIVE = gl.constexpr(
    "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.lt.u32 p, l, $2;"
    " @p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0; }"
)
LOADED = gl.constexpr("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$1]; mov.b32 $0, 0;")
MEET = gl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, 0;")
# Four elements of a thread: two neighbouring columns of rows m and m + 8.
READ = gl.constexpr("ld.shared.b32 $0, [$2]; ld.shared.b32 $1, [$2+2048];")
WRITE = gl.constexpr("st.shared.b32 [$2], $6; st.shared.b32 [$2+2048], $7; mov.b32 $0, $6; mov.b32 $1, $7;")
FOUR = gl.constexpr("=r,=r,r,r,r,r,r,r")


@gluon.jit
def open_barriers(first, COUNT: gl.constexpr):
    """In pairs: whether something is there, and whether its memory is free again.

    They are initialized here; the start of the warpgroups is a barrier between this and their first use.
    """
    for n in gl.static_range(COUNT):
        # Each loading thread arrives, or each computing warp.
        count = 8 if n % 2 == 1 else 128
        gl.inline_asm_elementwise(INIT, "=r,r,r", [first + 8 * n, count], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def open_turns(ring):
    """Two barriers by which the computing warpgroups let each other go first, each with a warp's arrivals of one."""
    for n in gl.static_range(2):
        at = ring + (TURNS_AT + 8 * n)
        gl.inline_asm_elementwise(INIT, "=r,r,r", [at, 4], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait(barrier, phase):
    gl.inline_asm_elementwise(WAIT, "=r,r,r", [barrier, phase], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive(barrier, how_often):
    """One arrival of each warp, or none where `how_often` is 0."""
    gl.inline_asm_elementwise(ARRIVE, "=r,r,r", [barrier, how_often], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def loaded(barrier):
    """Each thread arrives when what it has asked for so far is there."""
    gl.inline_asm_elementwise(LOADED, "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def position(m):
    """Position within the tile of row `m`: rows m and m + 8 of a warp's 16 are neighbours."""
    return (m & -16) + (m & 7) * 2 + (m // 8) % 2


@gluon.jit
def ring_places(ring):
    """Where a thread writes its columns of a block that begins at 0 or 128 bytes, and where it reads, shifted."""
    m = gl.arange(0, ROWS, layout=BY_SCORE)
    column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES)) // 2 * 4
    begin, swizzle = ring + ((m & -16) + (m & 7)) * 256, (m & 7) * 16
    shifted = (column[None, :] - (position(m) // 2 * 4)[:, None]) & 255
    return (begin + swizzle)[:, None] ^ column[None, :], begin[:, None] + (shifted ^ swizzle[:, None])


@gluon.jit
def write_ring(places, bias, half):
    gl.inline_asm_elementwise(MEET, "=r,r", [half], dtype=gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(
        WRITE, FOUR, [places ^ half, bias.to(gl.float16)], dtype=gl.float16, is_pure=False, pack=4
    )
    gl.inline_asm_elementwise(MEET, "=r,r", [half], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def read_ring(places, half):
    unread = gl.full([ROWS, KEYS], 0.0, gl.float16, SCORES)
    bias = gl.inline_asm_elementwise(READ, FOUR, [places ^ half, unread], dtype=gl.float16, is_pure=False, pack=4)
    return bias.to(gl.float32)

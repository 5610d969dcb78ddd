"""Marlin's words and scales in the registers of Hopper's matrix unit: where they lie in shared memory, and decoding.

A weight tile of 128 rows and 16 columns is operand A of two `wgmma` of 64 rows. Marlin stores its words in the order of
that operand's registers but for the number of the row, which is free: row `64 t + 16 q + r` of a tile (instruction t,
warp q, r < 16) is its output `32 q + 16 t + r`. So what a thread needs of 16 columns lies together: 8 bytes of codes in
NVFP4 and 16 in MXFP8, and 4 bytes of scales, which are those of rows r and r + 8 of both instructions. The layout is
that of `inkling_rl.formats.reference.marlin`.

The values are Marlin's bit by bit. NVFP4: codes widened to bfloat16 without correcting the exponent, times the scale,
exactly; the outer scale makes up for the exponents. MXFP8: code times 2^120 (exact), times the scale, rounded.

Declared in PTX: Gluon has no tensor of which one element is a word and eight are its codes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

OUTPUTS = gl.constexpr(128)
"""Of a warpgroup."""

# Per thread: in NVFP4, from the tile of its warpgroup on, 512 (warp / 2) + 16 lane + 8 (warp % 2), in MXFP8 twice that;
# scales 64 (warp / 2) + 8 (lane / 4) + 4 (warp % 2).
PLACE = gl.constexpr(
    "{ .reg .b32 t, l, w; mov.u32 t, %tid.x; and.b32 l, t, 31; shl.b32 l, l, 4;"
    " and.b32 w, t, 64; shl.b32 w, w, 3; or.b32 l, l, w; and.b32 w, t, 32; shr.u32 w, w, 2; or.b32 $0, l, w; }"
)
SCALE_PLACE = gl.constexpr(
    "{ .reg .b32 t, l, w; mov.u32 t, %tid.x; and.b32 l, t, 28; shl.b32 l, l, 1;"
    " and.b32 w, t, 64; or.b32 l, l, w; and.b32 w, t, 32; shr.u32 w, w, 3; or.b32 $0, l, w; }"
)
READ_1 = gl.constexpr("ld.shared.b32 $0, [$1];")
READ_2 = gl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")
READ_4 = gl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
COPY = gl.constexpr("cp.async.cg.shared.global [$1], [$2], 16; mov.b32 $0, 0;")
COPY_IF = gl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p cp.async.cg.shared.global [$1], [$2], 16; mov.b32 $0, 0; }"
)


def _shift(name: str, source: str, left: int) -> str:
    return f"shl.b32 {name}, {source}, {left};" if left >= 0 else f"shr.u32 {name}, {source}, {-left};"


def _picked(target: str, source: str, first: tuple[int, int], second: tuple[int, int]) -> str:
    """`target = (source << a) & mask | (source << b) & mask2`: four instructions, three where nothing is shifted."""
    (a, mask), (b, mask_b) = first, second
    text = f"{_shift('u', source, a)} and.b32 u, u, {mask:#x};" if a else f"and.b32 u, {source}, {mask:#x};"
    return f"{text} {_shift('v', source, b)} lop3.b32 {target}, v, {mask_b:#x}, u, 0xEA;"


def _decode_nvfp4() -> str:
    """Words at $16 and $32, the scales' at $48: byte t + 2 (row of the upper eight)."""
    text = "{ .reg .b32 u, v, s, d, e;"
    for t, word in enumerate(("$16", "$32")):
        sign, rest = (-1, -4) if t else (7, 4)
        text += _picked("s", "$48", (sign, 0x40004000), (rest, 0x07F007F0))
        text += " prmt.b32 d, s, s, 0x1010; prmt.b32 e, s, s, 0x3232;"
        for n in range(4):  # n-th nibbles: columns 0 and 1, then 8 and 9; then those of the row 8 further down
            register = f"${4 * t + 2 * (n % 2) + n // 2}"
            text += _picked("s", word, (12 - 4 * n, 0x80008000), (6 - 4 * n, 0x01C001C0))
            text += f" mul.rn.bf16x2 {register}, s, {'de'[n // 2]};"
    return text + " }"


def _decode_mxfp8() -> str:
    """Words at $16, $32 (rows r and r + 8 of the first instruction), $48 and $64, the scales' at $80."""
    text = "{ .reg .b32 u, v, s, d, c; mov.b32 c, 0x7B807B80;"
    for n in range(4):
        t, half = n // 2, n % 2
        byte = t + 2 * half
        text += f" prmt.b32 d, $80, 0, 0x{byte}4{byte}4; shr.u32 d, d, 1;"
        for late in range(2):  # columns 0 and 1 are bytes 0 and 2; columns 8 and 9 bytes 1 and 3
            sign, rest = (0, -4) if late else (8, 4)
            text += _picked("s", f"${16 + 16 * n}", (sign, 0x80008000), (rest, 0x07F007F0))
            text += f" mul.rn.bf16x2 s, s, c; mul.rn.bf16x2 ${4 * t + 2 * late + half}, s, d;"
    return text + " }"


DECODE_4 = gl.constexpr(_decode_nvfp4())
DECODE_8 = gl.constexpr(_decode_mxfp8())
# Eight registers of results; eight of a tensor that only gives the shape; 16 times the same word for each scalar.
SCALARS_3 = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 56))
SCALARS_5 = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 88))


@gluon.jit
def places(ring, warpgroup, BITS: gl.constexpr, K: gl.constexpr):
    """Where this thread's first codes and scales of stage 0 are. Differ by thread, though they look like scalars."""
    own = gl.inline_asm_elementwise(PLACE, "=r,r", [ring], dtype=gl.int32, is_pure=True, pack=1)
    scale = gl.inline_asm_elementwise(SCALE_PLACE, "=r,r", [ring], dtype=gl.int32, is_pure=True, pack=1)
    own = (own + warpgroup * 1024) * (BITS // 4)
    return ring + own, ring + K // 16 * 512 * BITS + warpgroup * 128 + scale


@gluon.jit
def decoded(unread, codes, scales, BITS: gl.constexpr):
    """Operand A, [128, 16] bfloat16 in the layout of `unread`, of the words at `codes` and the scales at `scales`."""
    s = gl.inline_asm_elementwise(READ_1, "=r,r", [scales], dtype=gl.int32, is_pure=False, pack=1)
    if BITS == 4:
        a, b = gl.inline_asm_elementwise(READ_2, "=r,=r,r", [codes], dtype=(gl.int32, gl.int32), is_pure=False, pack=1)
        return gl.inline_asm_elementwise(
            DECODE_4, SCALARS_3, [unread, a, b, s], dtype=gl.bfloat16, is_pure=True, pack=16
        )
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            READ_4, "=r,=r,=r,=r,r", [codes], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1
        )
        return gl.inline_asm_elementwise(
            DECODE_8, SCALARS_5, [unread, a, b, c, d, s], dtype=gl.bfloat16, is_pure=True, pack=16
        )


@gluon.jit
def copy16(target, source):
    """Sixteen bytes from each of `source` to each address in `target`."""
    gl.inline_asm_elementwise(COPY, "=r,r,l", [target, source], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy16_if(target, source, wanted):
    gl.inline_asm_elementwise(
        COPY_IF, "=r,r,l,r", [target, source, wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1
    )

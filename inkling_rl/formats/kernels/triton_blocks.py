"""Device functions that the Triton kernels of the number formats share: loads of a block, casts, packing.

Branches on constants are written with `else`: Triton compiles what follows an `if` that returns, taken or not.

A *block* here is a tuple of registers that one thread holds: eight 32-bit words (two bfloat16 each) or sixteen float32
values, with `TILE` blocks side by side in every tensor. The few lines of PTX are single instructions that Triton has no
name for; each says what it computes. Hopper has no cast to E2M1, hence the detour over E4M3.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl

from inkling_rl.formats.errors import FormatError

_SIGNS = tl.constexpr(-0x7F7F7F80)  # 0x80808080 as int32
_UPPER_HALF = tl.constexpr(-0x10000)  # 0xFFFF0000


def nearest_float32(value: float) -> float:
    """The float32 nearest to `value`, as a Python number."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def check_size(experts: int, values: int) -> None:
    """Refuse stacks that the kernels' grids and 32-bit places cannot hold.

    Raises:
        FormatError: 65,536 experts and more, or 2^31 values in one.
    """
    if experts >= 2**16 or values >= 2**31:
        raise FormatError(
            f"weight must have fewer than 65536 experts of fewer than 2^31 values each on CUDA; got {experts} of "
            f"{values}. Pass parts of it"
        )


def aligned(stored: torch.Tensor) -> torch.Tensor:
    """`stored` itself where it is contiguous and starts at a multiple of 16 bytes, else a copy that does."""
    if stored.is_contiguous() and stored.data_ptr() % 16 == 0:
        return stored
    return stored.clone(memory_format=torch.contiguous_format)


def pointers(weight: torch.Tensor) -> tuple[torch.Tensor, int, int, bool]:
    """`weight` `[E, N, K]` as the kernels read it, its strides in that unit, and whether its rows follow each other.

    bfloat16 is read as int32 pairs. A copy is made only where a row or its start is not in one aligned piece.
    """
    experts, rows, columns = weight.shape
    check_size(experts, rows * columns)
    weight = weight.detach()
    row_bytes = [stride * weight.element_size() for stride in weight.stride()[:2]]
    if weight.stride(2) != 1 or weight.data_ptr() % 16 or any(size % 16 for size in row_bytes):
        weight = weight.clone(memory_format=torch.contiguous_format)  # `contiguous` would not align
    if weight.dtype == torch.bfloat16:
        weight = weight.view(torch.int32)
    return weight, weight.stride(0), weight.stride(1), weight.stride(1) == weight.shape[2]


@triton.jit
def load_block(
    weight, block, inside, stride_n, BLOCKS_PER_ROW: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The 16 values of each block; `weight` points to the expert, int32 for bfloat16 pairs or float32.

    `stride_n` counts elements of that pointer. FLAT says that rows follow each other without a gap, EVEN that all
    blocks are inside.
    """
    WORDS: tl.constexpr = 16 if weight.dtype.element_ty == tl.float32 else 8
    if FLAT:
        start = block * WORDS
    else:
        start = (block // BLOCKS_PER_ROW).to(tl.int64) * stride_n + (block % BLOCKS_PER_ROW) * WORDS
    return load_16(weight + start, inside, EVEN, TILE)


@triton.jit
def load_16(start, inside, EVEN: tl.constexpr, TILE: tl.constexpr):
    """The 16 values from each of the pointers `start`; zeros where not `inside`."""
    first = start[:, None] + tl.arange(0, 4)[None, :]
    a = _load4(first, inside, EVEN, TILE)
    b = _load4(first + 4, inside, EVEN, TILE)
    if start.dtype.element_ty == tl.float32:
        return a + b + _load4(first + 8, inside, EVEN, TILE) + _load4(first + 12, inside, EVEN, TILE)
    else:
        return a + b


@triton.jit
def _load4(pointers, inside, EVEN: tl.constexpr, TILE: tl.constexpr):
    if EVEN:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=inside[:, None], other=0)
    even, odd = tl.split(tl.reshape(x, [TILE, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def column(b, i: tl.constexpr, two16):
    """Element i of each block as float32. `two16` is 65536, see `_low_bf16`."""
    if len(b) == 16:
        return b[i]
    elif i % 2 == 0:
        return _low_bf16(b[i // 2], two16)
    else:
        return (b[i // 2] & _UPPER_HALF).to(tl.float32, bitcast=True)


@triton.jit
def _low_bf16(word, two16):
    # A product instead of a shift, and by a number that the compiler does not know, so that it stays one: shifts, logic
    # and minima share a pipe of half the rate, and that pipe is the one that is full.
    return (word * two16).to(tl.float32, bitcast=True)


@triton.jit
def absmax(b):
    """Largest magnitude of each block as float32; NaN when there is one."""
    if len(b) == 16:
        m = tl.abs(b[0])
        for i in tl.static_range(1, 16):
            m = tl.maximum(m, tl.abs(b[i]), propagate_nan=tl.PropagateNan.ALL)
        return m
    else:
        w = _absmax_bf16x2(b[0], b[1])
        for i in tl.static_range(2, 8):
            w = _absmax_bf16x2(w, b[i])
        w = _absmax_bf16x2(w, byte_permute(w, w, 0x1032))
        return (w & 0x7FFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _absmax_bf16x2(a, b):
    # The magnitudes' maximum in each half; the sign bits that come with it mean nothing here.
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def sign_bytes(b, i: tl.constexpr):
    """Bytes whose top bits are the signs of elements 4i to 4i + 3; the other bits mean nothing."""
    if len(b) == 16:
        low = byte_permute(_bits(b[4 * i]), _bits(b[4 * i + 1]), 0x0073)
        high = byte_permute(_bits(b[4 * i + 2]), _bits(b[4 * i + 3]), 0x0073)
        return byte_permute(low, high, 0x5410)
    else:
        return byte_permute(b[2 * i], b[2 * i + 1], 0x7531)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def byte_permute(a, b, SELECT: tl.constexpr):
    """Four bytes out of a's (0-3) and b's (4-7), the lowest nibble of SELECT naming the lowest byte."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, SELECT], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def e4m3_pair(low, high):
    """E4M3 bytes of two float32 values, nearest even, saturating; `low` in bits 0-7, `high` in 8-15."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 p; cvt.rn.satfinite.e4m3x2.f32 p, $2, $1; cvt.u32.u16 $0, p; }",
        "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e4m3_two(low, high):
    """The two E4M3 bytes of `e4m3_pair`, each in a word of its own."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 p; .reg .b32 w;
        cvt.rn.satfinite.e4m3x2.f32 p, $3, $2;
        mov.b32 w, {p, 0};
        prmt.b32 $0, w, 0, 0x4440;
        prmt.b32 $1, w, 0, 0x4441;
        }""",
        "=r,=r,f,f", [low, high], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e4m3_pair_values(pair):
    """float32 values of the two E4M3 bytes of `e4m3_pair`."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 p, low, high; .reg .b32 halves;
        cvt.u16.u32 p, $2;
        cvt.rn.f16x2.e4m3x2 halves, p;
        mov.b32 {low, high}, halves;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
        }""",
        "=f,=f,r", [pair], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e4m3_pack(x0, x1, x2, x3):
    """Four float32 values to E4M3 bytes, nearest even, saturating; x0 in the lowest byte."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def pack_codes(first, second, first_signs, second_signs, four):
    """Eight E2M1 codes as one word, element 0 in the lowest nibble.

    `first` and `second` hold the magnitudes of elements 0-3 and 4-7, as `e4m3_pack` of 1/64 of the values: those are
    E4M3 subnormals and the lowest normals, whose byte is the code times 4. `*_signs` as `sign_bytes` gives them;
    `four` is 4.
    """
    # Sign and code in the upper nibble of each byte; the lower ones are zero.
    a = first * four + (first_signs & _SIGNS)
    b = second * four + (second_signs & _SIGNS)
    even, odd = byte_permute(a, b, 0x6420), byte_permute(a, b, 0x7531)
    return (even.to(tl.uint32, bitcast=True) >> 4).to(tl.int32, bitcast=True) | odd


@triton.jit
def abs_times(x, factor):
    """|x| * factor, in one instruction: from `tl.abs` the compiler makes one more."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 a; abs.f32 a, $1; mul.rn.f32 $0, a, $2; }",
        "=f,f,f", [x, factor], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def two_floats(word):
    """The float32 values in the low and the high half of int64 words."""
    return tl.inline_asm_elementwise(
        "mov.b64 {$0, $1}, $2;", "=f,=f,l", [word], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
    )


@triton.jit
def append(todo, target, value, capacity):
    """Append the lanes' 16-bit `value` where `todo` is not 0 to the list at address `target` (int64).

    A list is an int32 number of entries and, after it, `capacity` entries; beyond them only the number grows. PTX
    because Triton would compute addresses and carry the result for every lane, and nearly none has something to append.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .b32 n; .reg .b64 a; .reg .b16 h;
        setp.eq.s32 p, $1, 0;
        @p bra DONE;
        atom.relaxed.gpu.global.add.u32 n, [$2], 1;
        setp.ge.u32 p, n, $4;
        @p bra DONE;
        mad.wide.u32 a, n, 2, $2;
        cvt.u16.u32 h, $3;
        st.global.b16 [a+4], h;
        DONE: mov.b32 $0, 0;
        }""",
        "=r,r,l,r,r", [todo, target, value, capacity], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip

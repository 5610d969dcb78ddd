"""One row times 64-column blocks of an expert in Marlin's layout, on CUDA: the inner loop of `triton_moe_vector`.

Marlin's words are in the order in which the lanes of a warp feed `mma.m16n8k16`: a word (for MXFP8 two) decodes to the
left operand, 16 columns of the weight by 16 k. With one row, seven of the eight columns of the right operand would be
idle. So they take the k-tiles of a *chain* of eight: tile t has its inputs in column t and zeros elsewhere, and after
the chain column t holds the sums of tile t alone. Every lane then has other tiles, so block scales are decoded and
multiplied once in eight tiles, on float32 sums: codes are never rounded, and what a code costs is its bits.

Legend: W warps, each with chains of its own; lane = 4 g + q; e the four words of a load. Tensors are [32 W, 4], a row
for every thread, or [32 W, 1] where all four words need the same. That threads get the rows in this order is not
promised by the language: the tests look it up in the compiled code. The words: `inkling_rl.formats.reference.marlin`.

Codes are halves here, E2M1 times 2^-14 and E4M3 times 2^-8, subnormal ones included; inputs are halves as well.
"""

# Triton has no starred elements in tuples, and here tuples grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_UPPER_HALF = tl.constexpr(-0x10000)  # 0xFFFF0000 as int32
_SCALES = tl.constexpr(0x7F807F80)
_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "

# Nibbles p and p + 4 are one pair. Beside a pair's magnitude bits its sign must end up four bits above the highest:
# a rotation by 3 brings it there, from where one shift serves both. Odd and even nibbles apart: the sign falls into
# a neighbour. Pairs 0 and 1 belong to the row g, 2 and 3 to g + 8; 0 and 2 to the lower k.
MULTIPLY_4 = f"""{{
.reg .b32 t, even, odd, a<4>;
shf.l.wrap.b32 t, $4, $4, 3;
lop3.b32 even, t, $4, 0x40404040, 0xE4;
lop3.b32 odd, t, $4, 0x04040404, 0xE4;
shl.b32 a0, even, 9;
shl.b32 a1, even, 1;
shl.b32 a2, odd, 5;
shf.r.wrap.b32 a3, odd, odd, 3;
and.b32 a0, a0, 0x8E008E00;
and.b32 a1, a1, 0x8E008E00;
and.b32 a2, a2, 0x8E008E00;
and.b32 a3, a3, 0x8E008E00;
{_MMA}{{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, {{$5, $6}}, {{$7, $8, $9, $10}};
}}"""

# Bytes 0 and 2 of a word are the lower k, 1 and 3 the upper; $4 is the word of row g, $5 of g + 8.
_BYTES_8 = """shl.b32 t, {word}, 8;
shl.b32 {low}, {word}, 7;
shr.u32 {high}, {word}, 1;
lop3.b32 {low}, t, {low}, 0x80008000, 0xE4;
lop3.b32 {high}, {word}, {high}, 0x80008000, 0xE4;
and.b32 {low}, {low}, 0xBF80BF80;
and.b32 {high}, {high}, 0xBF80BF80;
"""
MULTIPLY_8 = (
    "{\n.reg .b32 t, a<4>;\n"
    + _BYTES_8.format(word="$4", low="a0", high="a2")
    + _BYTES_8.format(word="$5", low="a1", high="a3")
    + _MMA
    + "{$0, $2, $1, $3}, {a0, a1, a2, a3}, {$6, $8}, {$10, $12, $11, $13};\n}"
)
_FENCE = tl.constexpr("""{
.reg .pred p;
.reg .b64 nowhere;
setp.eq.s32 p, $28, -1;
@!p bra PASSED;
mov.b64 nowhere, 0;
st.global.v4.b32 [nowhere], {$4, $5, $6, $7};
st.global.v4.b32 [nowhere], {$8, $9, $10, $11};
st.global.v4.b32 [nowhere], {$12, $13, $14, $15};
st.global.v4.b32 [nowhere], {$16, $17, $18, $19};
st.global.v2.b32 [nowhere], {$20, $24};
exit;
PASSED:
mov.b32 $0, 0;
mov.b32 $1, 0;
mov.b32 $2, 0;
mov.b32 $3, 0;
}""")
_MULTIPLY_4, _MULTIPLY_8 = tl.constexpr(MULTIPLY_4), tl.constexpr(MULTIPLY_8)


@triton.jit
def accumulate(
    x, words, scales, expert, block, step, N: tl.constexpr, K: tl.constexpr,
    BLOCKS: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, BFLOAT16: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Sums of blocks `block` and, for BLOCKS 2, `block + step`: a tuple of two pieces [8, 4] each, see `columns`.

    `x` points to the row's pairs of values (int32), bfloat16 (then divided by 16) or halves. TILES is the length of a
    chain, 8 or 4. WAIT: the row comes from the kernel before; the first weights are on their way by then.
    """
    thread, e = tl.arange(0, WARPS * 32)[:, None], tl.arange(0, 4)[None, :]
    warp, lane = thread // 32, thread % 32
    at, scales_at = _places(words, scales, expert, block, step, lane, e, N, K, BLOCKS, BITS)
    words_now = ()
    for tile in tl.static_range(TILES):
        for cell in tl.static_range(BLOCKS * BITS // 4):
            words_now = words_now + (_words(at[cell], warp, tile, N, K, BITS, TILES),)
    scales_now = _scales(scales_at, warp, lane, N, K, BLOCKS, BITS, TILES)
    if WAIT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    low, high = _inputs(x, warp, lane, e, K, TILES)
    sums = ()
    for _ in tl.static_range(BLOCKS * 2):
        sums = sums + (tl.zeros([WARPS * 32, 4], tl.float32),)
    CHAINS: tl.constexpr = (K // 16 + TILES - 1) // TILES
    for start in range(0, CHAINS, WARPS):
        following = start + WARPS + warp
        next_low, next_high = _inputs(x, following, lane, e, K, TILES)
        low, high = _halves(low, BFLOAT16), _halves(high, BFLOAT16)
        chain, next_words, next_scales = _chain(
            words_now, low, high, at, scales_at, following, lane, next_low, next_high, expert, N, K, BLOCKS, BITS, TILES
        )
        sums = _scaled(sums, chain, scales_now, e, BLOCKS, BITS)
        low, high, scales_now, words_now = next_low, next_high, next_scales, next_words
    pieces = ()
    for piece in tl.static_range(BLOCKS * 2):
        of_warps = tl.reshape(sums[piece], [WARPS, 8, 4, 4])
        pieces = pieces + (tl.sum(tl.sum(of_warps, 2), 0),)
    return pieces


@triton.jit
def _places(
    words, scales, expert, block, step, lane, e, N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Of every cell, a block or for MXFP8 half of one, a lane's words; of every block its eight bytes of scales.

    All at tile 0. For NVFP4 a tile has its scales, for MXFP8 two have.
    """
    PARTS: tl.constexpr = BITS // 4
    first = words + expert.to(tl.int64) * (K // 16 * (N * BITS // 2)) + block * (32 * BITS) + lane * BITS + e
    of_scales = scales + expert.to(tl.int64) * (K // 16 // PARTS * (N // 8)) + block * 8 + lane // 4
    at, scales_at = (), ()
    for cell in tl.static_range(BLOCKS * PARTS):
        at = at + (first + cell // PARTS * step * (32 * BITS) + cell % PARTS * 4,)
    for number in tl.static_range(BLOCKS):
        scales_at = scales_at + (of_scales + number * step * 8,)
    return at, scales_at


@triton.jit
def _chain(
    words, low, high, at, scales_at, following, lane, next_low, next_high, expert, N: tl.constexpr, K: tl.constexpr,
    BLOCKS: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Sums by tile of a chain, and the words and scales of the following one, loaded where those of this are used up.

    For NVFP4 a block has four: tiles 2 q and 2 q + 1 of rows g, then of rows g + 8. For MXFP8 the rows alternate in e.
    """
    CELLS: tl.constexpr = BLOCKS * BITS // 4
    chain, next_words = (), ()
    for _ in tl.static_range(BLOCKS * 4):
        chain = chain + (tl.zeros(words[0].shape, tl.float32),)
    for tile in tl.static_range(TILES):
        mine = lane // 4 == tile
        low_tile, high_tile = tl.where(mine, low, 0), tl.where(mine, high, 0)
        grown = ()
        for cell in tl.static_range(CELLS):
            word = words[tile * CELLS + cell]
            if BITS == 4:
                grown = grown + _multiply_4(
                    word, low_tile, high_tile, chain[4 * cell], chain[4 * cell + 1], chain[4 * cell + 2],
                    chain[4 * cell + 3],
                )  # fmt: skip
            else:
                grown = grown + _multiply_8(word, low_tile, high_tile, chain[2 * cell], chain[2 * cell + 1])
            next_words = next_words + (_words(at[cell], following, tile, N, K, BITS, TILES),)
        chain = grown
        if (tile + 1) * CELLS % 4 == 0:
            _fence(next_words, next_low, next_high, expert, (tile + 1) * CELLS - 4)
        if tile == 4 // CELLS - 1:
            next_scales = _scales(scales_at, following, lane, N, K, BLOCKS, BITS, TILES)
    return chain, next_words, next_scales


@triton.jit
def columns(PIECE: tl.constexpr, BITS: tl.constexpr):
    """Which of a block's 64 columns are in its first or second piece, [8, 4]."""
    g, e = tl.arange(0, 8)[:, None], tl.arange(0, 4)[None, :]
    if BITS == 4:
        return g + 16 * e + 8 * PIECE
    else:
        return g + 8 * e + 32 * PIECE


@triton.jit
def _words(at, chain, TILE: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr):
    """A tile of every warp's chain. What lies beyond K is anything: its inputs and scales are zero."""
    tile = chain * TILES + TILE
    return tl.load(at + tile * (N * BITS // 2), mask=tile < K // 16, eviction_policy="evict_first")


@triton.jit
def _inputs(x, chain, lane, e, K: tl.constexpr, TILES: tl.constexpr):
    """Of tile g of a chain the pairs 2 q and 2 q + 8, [32 W, 1]; zero beyond K or the chain.

    A lane loads four pairs and keeps one: so the result is laid out as the words are, and nothing must be moved.
    """
    tile = chain * TILES + lane // 4
    inside = (tile < K // 16) & (lane // 4 < TILES)
    at = x + tile * 8 + e
    low, high = tl.load(at, mask=inside, other=0), tl.load(at + 4, mask=inside, other=0)
    mine = e == lane % 4
    low, high = tl.sum(tl.where(mine, low, 0), 1), tl.sum(tl.where(mine, high, 0), 1)
    return low[:, None], high[:, None]


@triton.jit
def _scales(
    at, chain, lane, N: tl.constexpr, K: tl.constexpr, BLOCKS: tl.constexpr, BITS: tl.constexpr, TILES: tl.constexpr
):
    """The scales of tiles 2 q and 2 q + 1 of a chain, int64 [32 W, 1] for each tile or for both, of each block."""
    PARTS: tl.constexpr = BITS // 4
    loaded = ()
    for number in tl.static_range(BLOCKS):
        for odd in tl.static_range(2 // PARTS):
            tile = chain * TILES + lane % 4 * 2 + odd
            inside = (tile < K // 16) & (lane % 4 * 2 < TILES)
            loaded = loaded + (tl.load(at[number] + tile // PARTS * (N // 8), mask=inside, other=0),)
    return loaded


@triton.jit
def _fence(loaded, low, high, number, FIRST: tl.constexpr):
    """Have four of `loaded` on their way here, the others too: a branch that needs them, never taken for `number` >= 0.

    The assembler schedules what a loop loads for its next round behind all of its arithmetic, where it would be waited
    for, unless something in between may need it. The branch ends the kernel with an illegal address.
    """
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            _FENCE, "=r,=r,=r,=r" + ",r" * 28,
            [loaded[FIRST], loaded[FIRST + 1], loaded[FIRST + 2], loaded[FIRST + 3], low, high,
             number + FIRST],
            dtype=tl.int32, is_pure=False, pack=4,
        )  # fmt: skip


@triton.jit
def _halves(pairs, BFLOAT16: tl.constexpr):
    """Two halves in an int32 of two bfloat16, divided by 16: room for values up to 2^20, and 2^-21 for the smallest."""
    if BFLOAT16:
        low = ((pairs << 16).to(tl.float32, bitcast=True) * 0.0625).to(tl.float16).to(tl.int16, bitcast=True)
        high = ((pairs & _UPPER_HALF).to(tl.float32, bitcast=True) * 0.0625).to(tl.float16).to(tl.int16, bitcast=True)
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        return pairs


@triton.jit
def _scaled(sums, chain, scales, e, BLOCKS: tl.constexpr, BITS: tl.constexpr):
    """`sums` and the sums of a chain by tile times their scales. Byte b of a scale word: e = b % 2, row 8 (b // 2)."""
    grown = ()
    for number in tl.static_range(BLOCKS):
        if BITS == 4:
            even_low, even_high = _decoded_4(scales[2 * number], e)
            odd_low, odd_high = _decoded_4(scales[2 * number + 1], e)
            low = sums[2 * number] + chain[4 * number] * even_low
            high = sums[2 * number + 1] + chain[4 * number + 2] * even_high
            grown = grown + (low + chain[4 * number + 1] * odd_low, high + chain[4 * number + 3] * odd_high)
        else:
            for part in tl.static_range(2):
                word = (scales[number] >> (32 * part)).to(tl.int32)
                scale = (((word >> (e // 2 * 8 + e % 2 * 16)) & 0xFF) << 23).to(tl.float32, bitcast=True)
                both = chain[4 * number + 2 * part] + chain[4 * number + 2 * part + 1]
                grown = grown + (sums[2 * number + part] + both * scale,)
    return grown


@triton.jit
def _decoded_4(scales, e):
    """Five bits of exponent and three of a mantissa are a half without its sign and its last seven bits."""
    word = tl.where(e < 2, scales.to(tl.int32), (scales >> 32).to(tl.int32))
    halves = ((word >> (e % 2 * 8)) << 7) & _SCALES
    return _as_float32(halves & 0xFFFF), _as_float32(halves >> 16)


@triton.jit
def _as_float32(half):
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _multiply_4(words, low, high, c0, c1, c2, c3):
    """Tile sums with those of one more tile, NVFP4: row g with columns 2 q, 2 q + 1 of the inputs, then row g + 8."""
    if _INTERPRETED:
        a0, a1 = _product(words, low, high, 0, 4), _product(words, low, high, 8, 4)
        return c0 + a0[0], c1 + a0[1], c2 + a1[0], c3 + a1[1]
    else:
        return tl.inline_asm_elementwise(
            _MULTIPLY_4, "=f,=f,=f,=f,r,r,r,f,f,f,f", [words, low, high, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _multiply_8(words, low, high, c0, c1):
    """The same for MXFP8, where the words of rows g and g + 8 alternate: columns 2 q, then 2 q + 1."""
    if _INTERPRETED:
        product = _product(words, low, high, 0, 8)
        return c0 + product[0], c1 + product[1]
    else:
        return tl.inline_asm_elementwise(
            _MULTIPLY_8, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [words, low, high, c0, c1],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _product(words, low, high, FIRST: tl.constexpr, BITS: tl.constexpr):
    """What the instruction computes, for the interpreter, which has none; FIRST is where a row's codes start."""
    WARPS: tl.constexpr = words.shape[0] // 32
    total = tl.zeros([WARPS, 8, 8, 4], tl.float32)
    for r in tl.static_range(4):
        # The low bit of r is 16 bits away, its high bit one code.
        code = (words >> (FIRST + 16 * (r % 2) + BITS * (r // 2))) & (2**BITS - 1)
        sign = (code >> (BITS - 1)) << 15
        half = sign | ((code & (2 ** (BITS - 1) - 1)) << (9 if BITS == 4 else 7))
        pairs = high if r >= 2 else low
        a = tl.reshape(_as_float32(half), [WARPS, 8, 1, 4, 4])
        b = tl.reshape(_as_float32((pairs >> (16 * (r % 2))) & 0xFFFF), [WARPS, 1, 8, 4, 1])
        total += tl.sum(a * b, 3)
    lanes = tl.permute(tl.reshape(total, [WARPS, 8, 4, 2, 4]), (0, 1, 2, 4, 3))
    even, odd = tl.split(lanes)
    return tl.reshape(even, [WARPS * 32, 4]), tl.reshape(odd, [WARPS * 32, 4])

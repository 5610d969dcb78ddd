"""Rows in the registers of a program, and mixtures of them, on CUDA: the parts of `triton_conv_mix`.

A row is a tuple of chunks of BLOCK columns. A chunk of bfloat16 numbers is a tensor of half as many words of two, as it
was loaded: carried through loops as numbers, each would take a register of its own. A mixture is an online softmax over
sources whose running factors are powers of two, so that nothing is rounded twice. Products that are added to something
are written as one `fma`: the compiler would fuse some of them and not others, depending on the code around.

Not the reference: that is `reference.mix_norm`.
"""

# Triton's tuples grow by concatenation.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
_NOWHERE = tl.constexpr(-1e9)  # exponent of the weight of a source that is not there, which is then 0


@triton.jit
def load_row(start, there, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """A row in words; 0 beyond its end, and everywhere if it is not `there`. Past the first cache."""
    chunks = ()
    for c in tl.static_range((HIDDEN + BLOCK - 1) // BLOCK):
        pointers, inside = words(start, c, HIDDEN, BLOCK)
        chunks = chunks + (tl.load(pointers, mask=inside & there, other=0, cache_modifier=".cg"),)
    return chunks


@triton.jit
def words(start, c: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the words of a chunk, and which of them are inside of the row."""
    if start.dtype.element_ty == tl.bfloat16:
        column = c * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        return start.to(tl.pointer_type(tl.int32), bitcast=True) + column, column < HIDDEN // 2
    else:
        column = c * BLOCK + tl.arange(0, BLOCK)
        return start + column, column < HIDDEN


@triton.jit
def wide(chunk):
    """Words as float32 numbers."""
    if chunk.dtype == tl.int32:
        even = (chunk << 16).to(tl.float32, bitcast=True)
        odd = (chunk & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(even, odd), [2 * chunk.shape[0]])
    else:
        return chunk.to(tl.float32)


@triton.jit
def narrow(value, like: tl.constexpr):
    """Float32 numbers as words of a dtype."""
    if like == tl.bfloat16:
        even, odd = tl.split(tl.reshape(value, [value.shape[0] // 2, 2]))
        if _COMPILED:
            return tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            low = even.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            return (odd.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low
    else:
        return value.to(like)


@triton.jit
def prefetch(pointers):
    """Ask for the lines at all of the pointers to be brought into the L2 cache: a hint, whatever they point to."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wide_row(chunks):
    numbers = ()
    for c in tl.static_range(len(chunks)):
        numbers = numbers + (wide(chunks[c]),)
    return numbers


@triton.jit
def load_batch(
    blocks, first, num_blocks, stride_source, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, BATCH: tl.constexpr
):
    loaded = ()
    for s in tl.static_range(BATCH):
        start = blocks + tl.cast(first + s, tl.int64) * stride_source
        loaded = loaded + load_row(start, first + s < num_blocks, HIDDEN, BLOCK)
    return loaded


@triton.jit
def nothing(QUERIES: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Mixtures of no source, their largest exponents and their sums of weights."""
    mixed, largest, total = (), (), ()
    for _q in tl.static_range(QUERIES):
        for _c in tl.static_range((HIDDEN + BLOCK - 1) // BLOCK):
            mixed = mixed + (tl.zeros([BLOCK], tl.float32),)
        largest, total = largest + (tl.cast(_NOWHERE, tl.int32),), total + (tl.cast(0.0, tl.float32),)
    return mixed, largest, total


@triton.jit
def added_batch(
    mixed, largest, total, added, queries, first, num_sources, per_hidden, score_scale, mix_eps,
    QUERIES: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, BATCH: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """The mixtures with BATCH more sources, of which those from `num_sources` on are not there."""
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    # The compiler keeps the queries in registers unless their address seems to change; by whole lines, lest it load
    # number by number.
    near = queries + (first >> 30) * 32 if RELOAD else queries
    sums = _sums(added, near, BATCH, QUERIES, HIDDEN, BLOCK)
    for s in tl.static_range(BATCH):
        there = first + s < num_sources
        inverse, wholes, parts = _scores(sums, s, there, per_hidden, score_scale, mix_eps, QUERIES)
        chunks = added[s * CHUNKS : (s + 1) * CHUNKS]
        mixed, largest, total = _added(mixed, largest, total, chunks, wholes, parts, inverse, QUERIES, CHUNKS)
    return mixed, largest, total


@triton.jit
def _sums(source, queries, BATCH: tl.constexpr, QUERIES: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over the row, source by source: of squares, and of products with each query."""
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    partial = ()
    for _ in tl.static_range(BATCH * (QUERIES + 1)):
        partial = partial + (tl.zeros([BLOCK], tl.float32),)
    for c in tl.static_range(CHUNKS):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        query = ()
        for q in tl.static_range(QUERIES):
            query = query + (tl.load(queries + q * HIDDEN + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32),)
        more = ()
        for s in tl.static_range(BATCH):
            value = source[s * CHUNKS + c]
            more = more + (tl.fma(value, value, partial[s * (QUERIES + 1)]),)
            for q in tl.static_range(QUERIES):
                more = more + (tl.fma(value, query[q], partial[s * (QUERIES + 1) + q + 1]),)
        partial = more
    if len(partial) == 2:
        return tl.reduce(partial, 0, _add_2)
    elif len(partial) == 4:
        return tl.reduce(partial, 0, _add_4)
    elif len(partial) == 8:
        return tl.reduce(partial, 0, _add_8)
    else:
        return tl.reduce(partial, 0, _add_16)


@triton.jit
def _add_2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def _add_8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def _add_16(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15,
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15,
):  # fmt: skip
    return (
        a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8, a9 + b9, a10 + b10,
        a11 + b11, a12 + b12, a13 + b13, a14 + b14, a15 + b15,
    )  # fmt: skip


@triton.jit
def _scores(sums, s: tl.constexpr, there, per_hidden, score_scale, mix_eps, QUERIES: tl.constexpr):
    """One over the root mean square of source s, and two to the power of its score under each query.

    A score is in units of log 2; its power is an exponent (int32) and a factor in (1/2, 1].
    """
    inverse = tl.rsqrt(tl.fma(sums[s * (QUERIES + 1)], per_hidden, mix_eps))
    exponents, factors = (), ()
    for q in tl.static_range(QUERIES):
        product = sums[s * (QUERIES + 1) + q + 1] * inverse
        whole = tl.ceil(product * score_scale)
        exponents = exponents + (tl.where(there, whole, _NOWHERE).to(tl.int32),)
        factors = factors + (tl.exp2(tl.fma(product, score_scale, -whole)),)
    return inverse, exponents, factors


@triton.jit
def _power(exponent):
    """2^exponent for an int32 of 0 or less, exactly; 0 below the least normal number."""
    return tl.where(exponent < -126, 0, (exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _added(mixed, largest, total, source, wholes, parts, inverse, QUERIES: tl.constexpr, CHUNKS: tl.constexpr):
    """The online softmax with one more source. Its running factors are powers of two, so nothing is rounded twice."""
    new_mixed, new_largest, new_total = (), (), ()
    for q in tl.static_range(QUERIES):
        whole, part = wholes[q], parts[q]
        kept = mixed[q * CHUNKS : (q + 1) * CHUNKS]
        kept_total, maximum = total[q], largest[q]
        if whole > maximum:
            kept_total *= _power(maximum - whole)
            kept = _times(kept, _power(maximum - whole), CHUNKS)
            maximum = whole
        new = part * _power(whole - maximum)
        new_largest = new_largest + (maximum,)
        new_total = new_total + (kept_total + new,)
        factor = new * inverse
        for c in tl.static_range(CHUNKS):
            new_mixed = new_mixed + (tl.fma(source[c], factor, kept[c]),)
    return new_mixed, new_largest, new_total


@triton.jit
def _times(values, factor, CHUNKS: tl.constexpr):
    products = ()
    for c in tl.static_range(CHUNKS):
        products = products + (values[c] * factor,)
    return products


@triton.jit
def store_normed(mixed, scale, weight, out, per_hidden, norm_eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm of `scale * mixed` times `weight`."""
    CHUNKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    squares = tl.zeros([BLOCK], tl.float32)
    learned = ()  # all of it is read before the first write, over which no read is moved
    for c in tl.static_range(CHUNKS):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        learned = learned + (tl.load(weight + columns, mask=columns < HIDDEN, other=0.0),)
        squares = tl.fma(mixed[c], mixed[c], squares)
    factor = scale * tl.rsqrt(tl.fma(tl.sum(squares, axis=0) * scale * scale, per_hidden, norm_eps))
    for c in tl.static_range(CHUNKS):
        columns = c * BLOCK + tl.arange(0, BLOCK)
        value = mixed[c] * factor * learned[c].to(tl.float32)
        tl.store(out + columns, value.to(out.dtype.element_ty), mask=columns < HIDDEN)

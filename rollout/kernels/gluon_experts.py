"""Products of many tokens with the experts that they chose, on Hopper's matrix unit, from Marlin's weights: Gluon.

Marlin's own kernel multiplies with `mma.sync`, which reaches 28 % of an H200's matrix rate. Here weights are operand A
of `wgmma`, decoded into registers, and tokens are operand B, from shared memory: out^T = W x^T. The parameters are the
same (`inkling_rl.formats.marlin`) and so are the values that are multiplied; only sums are in another order.

Per program 256 outputs of one expert and one block of tokens of it, 192 by 128 and 64 (Triton's sizes are powers of
two), or by one of the two if that is enough. Two warpgroups take 128 outputs each and share the tokens, so that one
decodes while the other multiplies; within one, the weights of 16 columns are decoded while the product of the previous
16 runs. A third warpgroup loads: rows of tokens by index, words and scales, several stages ahead; barriers in shared
memory are the only ones in the loop.

Per 16 columns and 192 tokens: 384 cycles of the matrix unit; of each scheduler about 2 x 82 instructions; from L2 8 KiB
(MXFP8 10), 21 (27) bytes per cycle, with all multiprocessors at work at about the same columns of the same blocks.

Not the choice of what to launch: `rollout.kernels.grouped_product`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from rollout.kernels.gluon_codes import OUTPUTS, copy16, copy16_if, decoded, places
from rollout.kernels.gluon_ring import INIT, arrive, loaded, wait

OPEN = gl.constexpr("{ .shared .align 1024 .b8 ring[43008]; mov.u32 $0, ring; }")
"""Words and scales of all stages, then the barriers; a multiple of 1 KiB, from where Triton's swizzled tiles count."""
BARRIERS = gl.constexpr(42496)
ZERO = gl.constexpr("mov.b32 $0, 0;")

LOADS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
NARROW_LOADS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
NARROW_TILE = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=2))


@gluon.jit(do_not_specialize=["pairs"])
def product_kernel(
    x, words, scales, outer, out, rows, experts, num_rows, pairs, INPUTS: gl.constexpr, SIZE: gl.constexpr,
    TOP_K: gl.constexpr, BITS: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, LOADER: gl.constexpr,
):  # fmt: skip
    tiles: gl.constexpr = (SIZE + 255) // 256
    block = gl.program_id(0) // tiles
    column = gl.program_id(0) % tiles * 256
    if block * (FIRST + SECOND) < gl.load(num_rows):
        expert = gl.load(experts + block).to(gl.int64)
        rows += block * (FIRST + SECOND)
        shared: gl.constexpr = TILE if K == 64 else NARROW_TILE
        x_first = gl.allocate_shared_memory(gl.bfloat16, [STAGES, FIRST, K], shared)
        x_second = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SECOND or 8, K], shared)
        out_s = gl.allocate_shared_memory(gl.bfloat16, [2, FIRST, OUTPUTS], TILE)
        ring = gl.inline_asm_elementwise(OPEN, "=r,r", [block], dtype=gl.int32, is_pure=False, pack=1)
        for n in gl.static_range(2 * STAGES):
            # Each loading thread arrives, or each computing warp.
            count = 8 if n % 2 == 1 else 128
            at = ring + BARRIERS + 8 * n
            gl.inline_asm_elementwise(INIT, "=r,r,r", [at, count], dtype=gl.int32, is_pure=False, pack=1)
        factor = 1.0
        if BITS == 4:
            factor = gl.load(outer + expert)
        words += expert * (INPUTS // 16 * SIZE * BITS // 2) + column * (BITS // 2)
        scales += expert * (INPUTS // (4 * BITS) * SIZE) + column
        # Few tokens in the block: one of the two products has room for them.
        kind = block * 0 + 2
        if SECOND:
            kind = (gl.load(rows + SECOND) < pairs).to(gl.int32) + (gl.load(rows + FIRST) < pairs).to(gl.int32)
        results = (out, rows, pairs, column, factor)
        tokens = (kind, x_first, x_second)
        gl.warp_specialize(
            [
                (_multiply, (results, tokens, out_s, ring, 0, INPUTS, SIZE, BITS, FIRST, SECOND, K, STAGES)),
                (_multiply, (results, tokens, out_s, ring, 1, INPUTS, SIZE, BITS, FIRST, SECOND, K, STAGES)),
                (_fetch, (x, words, scales, rows, pairs, column, tokens, ring, INPUTS, SIZE, TOP_K, BITS,
                          FIRST, SECOND, K, STAGES)),
            ],
            [4, 4], [REGISTERS, LOADER],
        )  # fmt: skip


@gluon.jit
def _next(slot, phase, STAGES: gl.constexpr):
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _fetch(
    x, words, scales, rows, pairs, column, tokens, ring, INPUTS: gl.constexpr, SIZE: gl.constexpr,
    TOP_K: gl.constexpr, BITS: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    kind, x_first, x_second = tokens
    sources = (x, words, scales, rows, pairs, column, ring)
    if kind == 2:
        _load(sources, x_first, x_second, INPUTS, SIZE, TOP_K, BITS, FIRST, SECOND, K, STAGES)
    if SECOND:
        if kind == 1:
            _load(sources, x_first, x_first, INPUTS, SIZE, TOP_K, BITS, FIRST, 0, K, STAGES)
        if kind == 0:
            _load(sources, x_second, x_second, INPUTS, SIZE, TOP_K, BITS, SECOND, 0, K, STAGES)


@gluon.jit
def _load(
    sources, x_first, x_second, INPUTS: gl.constexpr, SIZE: gl.constexpr, TOP_K: gl.constexpr, BITS: gl.constexpr,
    FIRST: gl.constexpr, SECOND: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the next columns of tokens, words and scales into the stages, as they become free."""
    x, words, scales, rows, pairs, column, ring = sources
    copies: gl.constexpr = BITS // 4
    loads: gl.constexpr = LOADS if K == 64 else NARROW_LOADS
    # A zero that the compiler cannot see through: else what follows is computed where all warpgroups begin, and spills.
    zero = gl.inline_asm_elementwise(ZERO, "=r,r", [ring], dtype=gl.int32, is_pure=False, pack=1)
    thread = gl.arange(0, 128, layout=LINE) + zero
    first = _rows(rows, 0, pairs, INPUTS, TOP_K, FIRST, loads)
    second = _rows(rows, FIRST, pairs, INPUTS, TOP_K, SECOND, loads) if SECOND else first
    k = gl.arange(0, K, layout=gl.SliceLayout(0, loads)) + zero * 64
    first = first[:, None] + k[None, :]
    second = second[:, None] + k[None, :]
    # What is beyond the last output is read from the last ones; nothing of it is stored.
    inside = (SIZE - column) * BITS // 2 - 4
    scale_at = thread * 16
    scale_from = scale_at // 256 * SIZE + gl.minimum(scale_at % 256, SIZE - column - 16)
    scale_rows: gl.constexpr = K // (4 * BITS)
    slot, phase = column * 0, column * 0 + 1
    for start in range(0, INPUTS, K):
        bar, stage = ring + BARRIERS + 16 * slot, ring + slot * (K * 32 * BITS + 256 * scale_rows)
        wait(bar + 8, phase)
        for kt in gl.static_range(K // 16):
            for n in gl.static_range(copies):
                word = thread * 4 + n * 512
                source = words + (start // 16 + kt) * (SIZE * BITS // 2) + gl.minimum(word, inside)
                copy16(stage + kt * (512 * BITS) + word * 4, source)
        wanted = thread < 16 * scale_rows
        copy16_if(stage + K * 32 * BITS + scale_at, scales + start // (4 * BITS) * SIZE + scale_from, wanted)
        async_copy.async_copy_global_to_shared(x_first.index(slot), x + start + first)
        if SECOND:
            async_copy.async_copy_global_to_shared(x_second.index(slot), x + start + second)
        loaded(bar)
        slot, phase = _next(slot, phase, STAGES)


@gluon.jit
def _rows(rows, start, pairs, INPUTS: gl.constexpr, TOP_K: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the rows of tokens begin; what only fills the block up is read from the last one."""
    pair = gl.load(rows + start + gl.arange(0, COUNT, layout=gl.SliceLayout(1, LAYOUT)))
    return gl.minimum(pair, pairs - 1) // TOP_K * INPUTS


@gluon.jit
def _multiply(
    results, tokens, out_s, ring, WARPGROUP: gl.constexpr, INPUTS: gl.constexpr, SIZE: gl.constexpr,
    BITS: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    kind, x_first, x_second = tokens
    out_s = out_s.index(WARPGROUP)
    if kind == 2:
        _outputs(results, x_first, x_second, out_s, ring, WARPGROUP, INPUTS, SIZE, BITS, FIRST, SECOND, K, STAGES)
    if SECOND:
        if kind == 1:
            _outputs(results, x_first, x_first, out_s, ring, WARPGROUP, INPUTS, SIZE, BITS, FIRST, 0, K, STAGES)
        if kind == 0:
            part_s = out_s.slice(0, SECOND, 0)
            _outputs(results, x_second, x_second, part_s, ring, WARPGROUP, INPUTS, SIZE, BITS, SECOND, 0, K, STAGES)


@gluon.jit
def _outputs(
    results, x_first, x_second, out_s, ring, WARPGROUP: gl.constexpr, INPUTS: gl.constexpr, SIZE: gl.constexpr,
    BITS: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """128 outputs of all tokens of the block, by one warpgroup."""
    one: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST, 16])
    two: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SECOND or 8, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, one, 2)
    same: gl.constexpr = gl.DotOperandLayout(0, two, 2)
    stage_bytes: gl.constexpr = K * 32 * BITS + 256 * (K // (4 * BITS))
    unread = gl.full([OUTPUTS, 16], 0.0, gl.bfloat16, weights)
    acc = gl.full([OUTPUTS, FIRST], 0.0, gl.float32, one)
    acc_2 = gl.full([OUTPUTS, SECOND or 8], 0.0, gl.float32, two)
    codes_at, scales_at = places(ring, WARPGROUP, BITS, K)
    slot, phase = ring * 0, ring * 0
    wait(ring + BARRIERS, phase)
    a = decoded(unread, codes_at, scales_at, BITS)
    for start in range(0, INPUTS, K):
        x_1, x_2 = x_first.index(slot), x_second.index(slot)
        bar = ring + BARRIERS + 16 * slot
        for kt in gl.static_range(K // 16):
            acc = warpgroup_mma(a, x_1.slice(16 * kt, 16, 1).permute((1, 0)), acc, is_async=True)
            if SECOND:
                a = gl.convert_layout(a, same, assert_trivial=True)
                acc_2 = warpgroup_mma(a, x_2.slice(16 * kt, 16, 1).permute((1, 0)), acc_2, is_async=True)
            if kt == K // 16 - 1:
                next_slot, next_phase = _next(slot, phase, STAGES)
                more = start + K < INPUTS  # else the same again, for nothing
                slot, phase = gl.where(more, next_slot, slot), gl.where(more, next_phase, phase)
                wait(ring + BARRIERS + 16 * slot, phase)
            then = (kt + 1) % (K // 16)
            scales = scales_at + slot * stage_bytes + then // (BITS // 4) * 256
            a = decoded(unread, codes_at + slot * stage_bytes + then * (512 * BITS), scales, BITS)
            # Products must not be on their way from one turn of the loop to the next: ptxas would run them one by one.
            # The other warpgroup has some in the queue.
            if SECOND:
                acc, acc_2 = warpgroup_mma_wait(0, [acc, acc_2])
            else:
                acc = warpgroup_mma_wait(0, [acc])
        arrive(bar + 8, 1)
    _store(acc, results, 0, out_s, WARPGROUP, SIZE, FIRST)
    if SECOND:
        _store(acc_2, results, FIRST, out_s.slice(0, SECOND, 0), WARPGROUP, SIZE, SECOND)


@gluon.jit
def _store(acc, results, start, out_s, WARPGROUP: gl.constexpr, SIZE: gl.constexpr, COUNT: gl.constexpr):
    """Rows of pairs, by way of shared memory: there a token's outputs come together."""
    out, rows, pairs, column, factor = results
    out_s.permute((1, 0)).store((acc * factor).to(gl.bfloat16))
    pair = gl.load(rows + start + gl.arange(0, COUNT, layout=gl.SliceLayout(1, LOADS)))
    m = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, LOADS))
    n = column + WARPGROUP * OUTPUTS + m // 16 % 4 * 32 + m // 64 * 16 + m % 16
    inside = (pair < pairs)[:, None]
    if SIZE % 256:
        inside = inside & (n < SIZE)[None, :]
    gl.store(out + pair[:, None] * SIZE + n[None, :], out_s.load(LOADS), mask=inside)

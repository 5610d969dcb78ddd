"""What decode attention makes logits of: queries and biases as operands of the matrix unit, and the product itself.

Queries and `r` come prepared, in the units of `rollout.kernels.units`, or become so here, in float32. How the bias
becomes a product: see `rollout.kernels.triton_decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl

COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def log_scale(position, alpha, floor, LOG_SCALING: tl.constexpr):
    """The factor of long contexts on queries and biases; see `reference.log_scale`."""
    if LOG_SCALING:
        return 1.0 + alpha * tl.log(tl.maximum((position + 1).to(tl.float32) / floor, 1.0))
    else:
        return position * 0.0 + 1.0


@triton.jit
def _clipped(x, scale, heads, channel, clip, factor):
    """Rows of `x` [ROWS, C] times the heads' scale, at most `clip` long, times `factor`; as they are if no `scale`."""
    if scale is not None:
        x *= tl.load(scale + heads[:, None] * channel.shape[0] + channel[None, :]).to(tl.float32)
        x *= (tl.minimum(clip / (tl.sqrt(tl.sum(x * x, 1)) + 1e-6), 1.0) * factor)[:, None]
    return x


@triton.jit
def load_queries(q, scale, row, heads, real, factor, stride, clip, HEAD_DIM: tl.constexpr):
    """Queries [ROWS, D] in float32, such that a product with a key is a logit in base 2; zeros in rows not real."""
    channel = tl.arange(0, HEAD_DIM)
    place = row.to(tl.int64) * stride + heads * HEAD_DIM
    x = tl.load(q + place[:, None] + channel[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    return _clipped(x, scale, heads, channel, clip, factor / HEAD_DIM**0.5)


@triton.jit
def load_biases(r, scale, row, heads, real, factor, stride, clip, REL: tl.constexpr):
    """`r` [ROWS, REL] in float32, such that a product with `proj` is a bias in base 2; zeros in rows not real."""
    channel = tl.arange(0, REL)
    place = row.to(tl.int64) * stride + heads * REL
    x = tl.load(r + place[:, None] + channel[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    return _clipped(x, scale, heads, channel, clip, factor)


@triton.jit
def load_profiles(
    proj, distance, REL: tl.constexpr, EXTENT: tl.constexpr, MAX_QUERIES: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """`proj` at a tile's distances: for one query token [REL, TILE], a column for each position, else [REL, 2 TILE] by
    ascending distance. Zero outside of the extent. `distance` is from the tile's last position to the first query.
    """
    if MAX_QUERIES == 1:
        distances = distance + (TILE - 1 - tl.arange(0, TILE))
    else:
        distances = distance + tl.arange(0, 2 * TILE)
    inside = (distances >= 0) & (distances < EXTENT)
    place = (tl.arange(0, REL) * EXTENT)[:, None] + distances[None, :]
    return tl.load(proj + place, mask=inside[None, :], other=0.0)


@triton.jit
def add_bias(logits, biases, profiles, token, MAX_QUERIES: tl.constexpr, TILE: tl.constexpr, MODE: tl.constexpr):
    """Add each query's bias at each position of a tile, of which `load_profiles` gave the profiles."""
    if MAX_QUERIES == 1:
        return _product(logits, biases, profiles, MODE)
    else:
        by_distance = _product(None, biases, profiles, MODE)
        shift = tl.minimum(token, MAX_QUERIES)[:, None] + (TILE - 1 - tl.arange(0, TILE))[None, :]
        return logits + tl.gather(by_distance, shift, 1)


@triton.jit
def _product(total, biases, profiles, MODE: tl.constexpr):
    """`biases profiles + total`, in bfloat16 with operands split into two numbers where they do not fit one."""
    if MODE == "ieee":
        return dot(biases, profiles.to(tl.float32), total, MODE)
    high = biases.to(tl.bfloat16)
    profiles_high = profiles.to(tl.bfloat16)
    total = dot(high, profiles_high, total, MODE)
    total = dot((biases - high.to(tl.float32)).to(tl.bfloat16), profiles_high, total, MODE)
    if profiles.dtype == tl.float32:
        total = dot(high, (profiles - profiles_high.to(tl.float32)).to(tl.bfloat16), total, MODE)
    return total


@triton.jit
def dot(a, b, total, MODE: tl.constexpr):
    """`a b + total` in float32: of bfloat16 by the matrix unit (interpreted, of float32 copies), of float32 by FMA.

    float32 is here to be exact. Three tf32 products, which Triton offers for it, go through `wgmma` where there are 64
    rows, every operand split in registers; on an H200 (Triton 3.6.0) that came out wrong from the second tile on.
    """
    if MODE == "bf16" and COMPILED:
        return tl.dot(a, b, total)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")

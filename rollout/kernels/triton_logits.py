"""What decode attention makes logits of: queries and biases as operands of the matrix unit, and the product itself.

Queries and `r` come scaled and clipped, or become so here, in float32; both are brought to base 2 and multiplied by the
log-length factor. How the bias becomes a product: see `rollout.kernels.triton_decode`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def log_scale(position, alpha, floor, LOG_SCALING: tl.constexpr):
    """The factor of long contexts on queries and biases; see `reference.log_scale`."""
    if LOG_SCALING:
        return 1.0 + alpha * tl.log(tl.maximum((position + 1).to(tl.float32) / floor, 1.0))
    else:
        return position * 0.0 + 1.0


@triton.jit
def _clipped(x, source, scale, heads, channel, clip):
    """Rows of `x` [ROWS, C] times the heads' scale, no longer than `clip`; as they are when `scale` is None."""
    if scale is not None:
        x *= tl.load(scale + heads[:, None] * channel.shape[0] + channel[None, :]).to(tl.float32)
        x *= tl.minimum(clip / (tl.sqrt(tl.sum(x * x, 1)) + 1e-6), 1.0)[:, None]
    return x


@triton.jit
def load_queries(q, scale, row, heads, real, factor, stride, clip, HEAD_DIM: tl.constexpr):
    """Queries [ROWS, D] in float32, such that a product with a key is a logit in base 2; zeros in rows not real."""
    channel = tl.arange(0, HEAD_DIM)
    place = row.to(tl.int64) * stride + heads * HEAD_DIM
    x = tl.load(q + place[:, None] + channel[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    return _clipped(x, q, scale, heads, channel, clip) * (factor / HEAD_DIM**0.5)[:, None]


@triton.jit
def load_biases(r, scale, row, heads, real, factor, stride, clip, REL: tl.constexpr):
    """`r` [ROWS, REL] in float32, such that a product with `proj` is a bias in base 2; zeros in rows not real."""
    channel = tl.arange(0, REL)
    place = row.to(tl.int64) * stride + heads * REL
    x = tl.load(r + place[:, None] + channel[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    return _clipped(x, r, scale, heads, channel, clip) * factor[:, None]


@triton.jit
def add_bias(
    logits, biases, proj, distance, token, REL: tl.constexpr, EXTENT: tl.constexpr, MAX_QUERIES: tl.constexpr,
    TILE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Add each query's bias at each position of a tile; `distance` is from its last position to the first query."""
    if MAX_QUERIES == 1:
        ahead = TILE - 1 - tl.arange(0, TILE)
        return _profile_product(logits, biases, proj, distance + ahead, REL, EXTENT, MODE)
    else:
        ahead = tl.arange(0, 2 * TILE)
        by_distance = _profile_product(None, biases, proj, distance + ahead, REL, EXTENT, MODE)
        shift = tl.minimum(token, MAX_QUERIES)[:, None] + (TILE - 1 - tl.arange(0, TILE))[None, :]
        return logits + tl.gather(by_distance, shift, 1)


@triton.jit
def _profile_product(
    total, biases, proj, distance, REL: tl.constexpr, EXTENT: tl.constexpr, MODE: tl.constexpr
):  # fmt: skip
    """`biases proj[:, distance] + total`; zero outside of the extent."""
    inside = (distance >= 0) & (distance < EXTENT)
    place = (tl.arange(0, REL) * EXTENT)[:, None] + distance[None, :]
    profiles = tl.load(proj + place, mask=inside[None, :], other=0.0)
    if MODE == "ieee" or MODE == "tf32x3":
        return dot(biases, profiles.to(tl.float32), total, MODE)
    high = biases.to(tl.bfloat16)
    profiles_high = profiles.to(tl.bfloat16)
    total = dot(high, profiles_high, total, MODE)
    total = dot((biases - high.to(tl.float32)).to(tl.bfloat16), profiles_high, total, MODE)
    if proj.dtype.element_ty == tl.float32:
        total = dot(high, (profiles - profiles_high.to(tl.float32)).to(tl.bfloat16), total, MODE)
    return total


@triton.jit
def dot(a, b, total, MODE: tl.constexpr):
    """`a b + total` in float32."""
    if MODE == "bf16":
        return tl.dot(a, b, total)
    elif MODE == "bf16-emulated":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(a, b, total, input_precision=MODE)

"""What a step of the model must move and compute, by part, and which part a kernel of the timeline belongs to.

Pure bookkeeping: nothing here needs a GPU or runs a model. Bytes count every input once and every output once, with
weights as they are stored and activations in bfloat16; operations count what is useful: products of the projections, of
the chosen experts and of the keys that a query sees, not the masked halves of tiles, the biases, sinks or router.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inkling_rl.formats import ExpertFormat
from rollout.plugin.shape import AttentionShape, ModelShape

PARTS = (
    "projections", "prepare", "attention", "merge", "o-projection", "conv_mix", "router", "align", "expert GEMMs",
    "activation", "sum", "unembedding", "other",
)  # fmt: skip
BYTES_PER_WEIGHT: dict[ExpertFormat, float] = {"bf16": 2.0, "nvfp4": 0.5 + 1 / 16, "mxfp8": 1 + 1 / 32}
"""Codes and their scales; the scales of whole experts are left out."""

BF16, F32 = 2, 4


@dataclass(frozen=True)
class Work:
    """A step: (tokens already there, rows of this step) per request, and how many rows get logits."""

    requests: tuple[tuple[int, int], ...]
    logit_rows: int

    @property
    def rows(self) -> int:
        return sum(new for _, new in self.requests)

    def visible(self, window: int | None) -> int:
        """Positions whose keys at least one query of their request sees."""
        return sum((past if window is None else min(past, window - 1)) + new for past, new in self.requests)

    def pairs(self, window: int | None) -> int:
        """Pairs of a query and a key that it sees, per head."""
        total = 0
        for past, new in self.requests:
            short = max(0, min(new, (window or past + new) - past))
            # `short` queries see all that came before them; the others a whole window.
            total += short * past + short * (short + 1) // 2 + (new - short) * (window or 0)
        return total

    def earlier(self, taps: int) -> int:
        """Inputs of earlier steps that short convolutions read from pages."""
        return sum(min(past, taps - 1) for past, _ in self.requests)


def bytes_by_part(shape: ModelShape, work: Work, distinct: Sequence[float]) -> dict[str, float]:
    """Fewest bytes per part and step. What attention's merge reads and writes beyond attention itself counts as none.

    Args:
        shape: of the model.
        work: the step.
        distinct: per layer, how many experts at least one row chose.
    """
    total = dict.fromkeys(PARTS, 0.0)
    hidden, rows, pairs = shape.hidden_size, work.rows, work.rows * shape.experts_per_token
    for layer in range(shape.num_layers):
        for part, size in _attention_bytes(shape, shape.attention(layer), work).items():
            total[part] += size
        total["conv_mix"] += _mix_bytes(shape, layer, work)
        total["router"] += shape.num_experts * hidden * F32 + rows * hidden * BF16 + pairs * 2 * F32
        total["align"] += pairs * 2 * F32
        total["expert GEMMs"] += distinct[layer] * expert_bytes(shape, shape.expert_formats[layer])
        total["expert GEMMs"] += (rows * hidden + pairs * (3 * shape.expert_width + hidden)) * BF16
        total["activation"] += pairs * 3 * shape.expert_width * BF16
        total["sum"] += (pairs + rows) * hidden * BF16 + pairs * F32
    logits = work.logit_rows * (hidden * BF16 + shape.vocab_size * F32)
    total["unembedding"] = shape.unpadded_vocab_size * hidden * BF16 + logits if work.logit_rows else 0.0
    # The embedding's rows, their norm and the first layer's.
    total["other"] = 6 * rows * hidden * BF16
    return total


def expert_bytes(shape: ModelShape, expert_format: ExpertFormat) -> float:
    """One expert as it is stored."""
    return 3 * shape.expert_width * shape.hidden_size * BYTES_PER_WEIGHT[expert_format]


def _attention_bytes(shape: ModelShape, kind: AttentionShape, work: Work) -> dict[str, float]:
    hidden, rows, taps = shape.hidden_size, work.rows, shape.conv_taps
    q, k, r = kind.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim, kind.num_heads * shape.d_rel
    outputs, inputs = 2 * q + r + 2 * k, 3 if kind.window is None else 1
    small = kind.num_heads + (2 * kind.num_kv_heads * taps if kind.window is None else 0)
    return {
        "projections": (outputs * BF16 + small * F32) * (hidden + rows) + inputs * rows * hidden * BF16,
        # In: q, k, v, r and the inputs that came before. Out: q, r, a row of pages, a row of convolution state.
        "prepare": rows * (2 * q + 6 * k) * BF16 + rows * r * 2 * BF16 + work.earlier(taps) * 2 * k * BF16,
        "attention": work.visible(kind.window) * 2 * k * BF16
        + rows * ((3 * q + r) * BF16 + kind.num_heads * F32)
        + shape.d_rel * kind.rel_extent * F32,
        "o-projection": q * hidden * BF16 + rows * (q + hidden) * BF16,
    }


def _mix_bytes(shape: ModelShape, layer: int, work: Work) -> float:
    """Both passes of a layer: convolution, residual, mixture of the finished blocks and norm."""
    finished = layer // shape.layers_per_block + 1
    opens = layer % shape.layers_per_block == 0
    following = 3 if layer + 1 < shape.num_layers and shape.is_full[layer + 1] else 1
    total = 0.0
    for outputs, residual in ((1, 0 if opens else 1), (following, 1)):
        # The input, what is added to it, the blocks; out the running block, the state and the next inputs.
        planes = 1 + residual + finished + 2 + outputs
        total += (work.rows * planes + work.earlier(shape.conv_taps)) * shape.hidden_size * BF16
        total += (shape.conv_taps + 2 * outputs) * shape.hidden_size * F32
    return total


def operations_by_part(shape: ModelShape, work: Work) -> dict[str, float]:
    """Useful floating-point operations per part and step."""
    total = dict.fromkeys(PARTS, 0.0)
    hidden, rows = shape.hidden_size, work.rows
    for layer in range(shape.num_layers):
        kind = shape.attention(layer)
        q, k, r = kind.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim, kind.num_heads * shape.d_rel
        total["projections"] += 2.0 * rows * hidden * (2 * q + r + 2 * k)
        total["attention"] += 4.0 * q * work.pairs(kind.window)
        total["o-projection"] += 2.0 * rows * hidden * q
        total["expert GEMMs"] += 6.0 * rows * shape.experts_per_token * shape.expert_width * hidden
    total["unembedding"] = 2.0 * work.logit_rows * hidden * shape.unpadded_vocab_size
    return total


def without_unembedding(by_part: dict[str, float]) -> float:
    return sum(size for part, size in by_part.items() if part != "unembedding")


# What a kernel's name says, and the part of those without a telling name (matrix products, copies) that come after it.
# "conv_mix" and "expert GEMMs" depend on how many came before, see `parts_of`.
_NAMES: tuple[tuple[str, str, str], ...] = (
    ("sources_kernel", "prepare", "projections"),
    ("prepare_kernel", "prepare", "attention"),
    ("table_kernel", "attention", "attention"),
    ("decode_kernel", "attention", "o-projection"),
    ("prefill_kernel", "attention", "o-projection"),
    ("merge_kernel", "merge", "o-projection"),
    ("logits_kernel", "router", "router"),
    ("segment_kernel", "router", "router"),
    ("choose_kernel", "router", "align"),
    ("align_kernel", "align", "align"),
    ("activation_kernel", "activation", "expert GEMMs"),
    ("product_kernel", "expert GEMMs", "sum"),
    ("expert_up_kernel", "expert GEMMs", "expert GEMMs"),
    ("expert_down_kernel", "expert GEMMs", "expert GEMMs"),
    ("sum_kernel", "sum", "sum"),
    ("softcap_kernel", "unembedding", "unembedding"),
)


def parts_of(names: Sequence[str], num_layers: int) -> list[str]:
    """The part of every kernel of one step, given their names in the order in which they ran.

    Raises:
        ValueError: the order is not that of a step of so many layers.
    """
    parts, following, mixes, products = [], "other", 0, 0
    for name in names:
        if "conv_mix_kernel" in name or "early_kernel" in name:
            parts.append("conv_mix")
            mixes, products = mixes + 1, 0
            after_layer = "unembedding" if mixes == 2 * num_layers else "projections"
            following = "router" if mixes % 2 else after_layer
        elif "marlin" in name.lower():
            parts.append("expert GEMMs")
            products += 1
            following = "sum" if products == 2 else "expert GEMMs"
        elif found := next((row for row in _NAMES if row[0] in name), None):
            parts.append(found[1])
            following = found[2]
        else:
            parts.append(following)
    if mixes != 2 * num_layers:
        raise ValueError(f"a step of {num_layers} layers must mix {2 * num_layers} times; got {mixes} in {names[:9]}")
    return parts


def lengths_alone(ranges: Sequence[tuple[float, float]]) -> list[float]:
    """How long each ran after all before it had ended, given (start, end) in the order of their starts.

    A kernel that is launched early waits inside its own time; what it waits for is counted where it ran.
    """
    lengths, ended = [], -math.inf
    for start, end in ranges:
        lengths.append(max(0.0, end - max(start, ended)))
        ended = max(ended, end)
    return lengths


def split_steps(names: Sequence[str], steps: int) -> list[range]:
    """Where each of several equal steps lies in one timeline.

    Raises:
        ValueError: they are not equal.
    """
    size, rest = divmod(len(names), steps)
    pieces = [range(i * size, (i + 1) * size) for i in range(steps)]
    if rest or size == 0 or any([names[i] for i in piece] != list(names[:size]) for piece in pieces):
        raise ValueError(f"{steps} replays must run the same kernels each; got {len(names)} kernels in all")
    return pieces


def table(
    times: dict[str, float], launches: dict[str, int], by_bytes: dict[str, float], by_operations: dict[str, float],
    bandwidth: float, rate: float,
) -> list[dict[str, float | str]]:  # fmt: skip
    """A row per part that ran: microseconds, launches, the bound and what share of the time it is.

    Args:
        times: microseconds per part.
        launches: kernels per part.
        by_bytes: bytes per part.
        by_operations: operations per part.
        bandwidth: bytes per microsecond.
        rate: operations per microsecond.
    """
    rows: list[dict[str, float | str]] = []
    for part in PARTS:
        if not launches.get(part):
            continue
        moved, computed = by_bytes[part] / bandwidth, by_operations[part] / rate
        bound = max(moved, computed)
        rows.append({
            "part": part, "us": times[part], "launches": launches[part], "bytes_us": moved, "operations_us": computed,
            "of_bound": bound / times[part], "by": "operations" if computed > moved else "bytes",
        })  # fmt: skip
    return rows

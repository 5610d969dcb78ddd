"""In what `prepare` leaves queries and mixtures of the relative bias, and what every attention kernel takes them in.

Scores are in units of log2, so that an exponential is one instruction: a prepared query is scaled, clipped, multiplied
by the log-length factor and by `LOG2_E / sqrt(D)`, a prepared mixture alike but for the `sqrt(D)`. Both are rounded
once, after all factors. Sinks stay natural logarithms; nothing else in a kernel has a unit.

Mixtures beside bfloat16 queries are float16: clips bound them (8 log2 e, times the log-length factor), and with three
more bits than a query (11 against 8) their rounding adds an eighth of the query's to a score of the same size. The
model itself, in bfloat16, rounds mixtures, their products with the profiles and the sums with the scores to bfloat16.
"""

from __future__ import annotations

import torch

LOG2_E = 1.4426950408889634


def query_units(head_dim: int) -> float:
    """What a query is multiplied by beside learned and log-length factors."""
    return LOG2_E / head_dim**0.5


def mixture_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of prepared mixtures beside queries of `dtype`."""
    return torch.float16 if dtype == torch.bfloat16 else dtype

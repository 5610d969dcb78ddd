"""How a launch of prefill attention is shaped, and which of its two kernels that means: `choose_tiles` decides.

Not the launch itself (`rollout.kernels.triton_prefill`). What was compared: `python -m tests.benchmarks.prefill_gpu`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

REGISTERS = {"REGISTERS": 216, "LOADING": 72}
"""Of a thread that computes and of one that loads in `gluon_prefill`; twice and once, they are all that there are."""

INTERPRETED = triton.knobs.runtime.interpret


class Tiles(NamedTuple):
    """How a launch is shaped. All but `stages` are powers of two; `positions * packed` rows, 16 per warp."""

    positions: int
    packed: int
    keys: int
    warps: int
    stages: int
    shared: bool = True
    """Whether the ring of biases lies in shared memory; else in global memory (any dtype, slower)."""

    specialized: bool = False
    """Whether `gluon_prefill` does it: Hopper, 64 positions, 2 heads of 128, 64 keys, d_rel 16, 12 warps."""

    lazy: bool = True
    """Whether `gluon_prefill` scales accumulated values only where a maximum has moved by much."""

    held: bool = False
    """Whether it holds queries in registers."""

    turns: bool = False
    """Whether its two warpgroups that compute issue their products in turn."""


def choose_tiles(
    head_dim: int, group: int, dtype: torch.dtype, *, hopper: bool = False, window: int | None = None
) -> Tiles:
    """Shape of a launch, see tests/benchmarks/prefill_gpu.py; `hopper` is whether `gluon_prefill` takes the rows.

    Queries in registers together with products in turn gain 5 - 10 % from 8K keys on; with a window of 1024, and for
    prompts of 500, they lose 3 - 5 %.

    The ring is static shared memory, of which CUDA allows 48 KiB, and together with the pipeline's where that takes
    less than 48 KiB: hence the small tiles of small heads and of heads that share keys with no other.
    """
    packed = 2 if group % 2 == 0 else 1
    if dtype == torch.float32:
        return Tiles(32 // packed, packed, 32, 4, 1, shared=False)
    if head_dim == 128:
        if packed == 2 and hopper:
            return Tiles(64, 2, 64, 12, 3, specialized=True, held=window is None, turns=window is None)
        return Tiles(64, 2, 64, 8, 3) if packed == 2 else Tiles(64, 1, 64, 4, 2)
    return Tiles(64 // packed, packed, 32, 4, 2)


def ring_sizes(tiles: Tiles, exact: bool) -> dict[str, Any]:
    """Constants of the kernel that follow from the tiles; `exact` is for float32 keys and values.

    The pitch of a row is 8 elements more than the ring: the 8 rows and 4 pairs that a warp writes at once lie in 32
    banks. Reading them shifted by half a pair per row costs two turns.
    """
    shared = tiles.shared and not INTERPRETED
    assert not shared or (tiles.positions * tiles.packed == 16 * tiles.warps and not exact)
    ring = 2 * max(tiles.positions, tiles.keys)
    # Triton's own shared memory begins after the ring's, and the swizzles of its tiles count from multiples of 1 KiB.
    assert not shared or tiles.positions * tiles.packed * (ring + 8) * 2 % 1024 == 0
    return {
        "POSITIONS": tiles.positions, "PACKED": tiles.packed, "KEYS": tiles.keys, "RING": ring, "PITCH": ring + 8,
        "SHARED": shared,
        "PRECISION": "widened" if INTERPRETED else "ieee" if exact else "tf32",
    }  # fmt: skip

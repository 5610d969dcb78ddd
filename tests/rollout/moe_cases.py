"""Cases of the kernels between router and Marlin, for the interpreter on a CPU and for a GPU."""

from __future__ import annotations

import torch

from rollout.kernels import triton_moe_align, triton_moe_sum
from rollout.kernels.triton_moe_align import Blocks


def chosen_experts(tokens: int, num_experts: int, top_k: int, device: str, seed: int = 0) -> torch.Tensor:
    """Ascending numbers of distinct experts, int32 [tokens, top_k]; the low ones are chosen more often."""
    g = torch.Generator().manual_seed(seed)
    favour = torch.rand(tokens, num_experts, generator=g) * torch.linspace(1.5, 1.0, num_experts)
    return favour.topk(top_k).indices.sort(1).values.int().to(device)


def check_blocks(blocks: Blocks, experts_TK: torch.Tensor, block_size: int) -> None:
    """Every pair is in exactly one block of its expert; what fills a block comes after, and is no pair."""
    used = int(blocks.num_rows)
    assert used % block_size == 0
    rows = blocks.rows[:used].view(-1, block_size).cpu()
    owners = blocks.experts[: len(rows)].cpu().tolist()
    numbers = experts_TK.flatten().cpu()
    found: list[int] = []
    for row, owner in zip(rows, owners, strict=True):
        pairs = row[row < len(numbers)]
        assert (
            len(pairs) and bool((row[: len(pairs)] == pairs).all()) and bool((row[len(pairs) :] == len(numbers)).all())
        )
        assert bool((numbers[pairs.long()] == owner).all())
        found += pairs.tolist()
    assert sorted(found) == list(range(len(numbers)))
    # No more blocks than needed, and an order that does not depend on chance.
    counts = numbers.bincount()
    assert len(rows) == int((-(-counts // block_size)).sum())
    assert found == sorted(found, key=lambda pair: (int(numbers[pair]), pair))


def check_align(device: str, tokens: int, num_experts: int, top_k: int, block_size: int) -> None:
    experts_TK = chosen_experts(tokens, num_experts, top_k, device, seed=tokens)
    check_blocks(triton_moe_align.align(experts_TK, num_experts, block_size), experts_TK, block_size)


def check_single_token(device: str, num_experts: int, top_k: int, block_size: int) -> None:
    experts_TK = chosen_experts(1, num_experts, top_k, device)
    rows, num_rows = triton_moe_align.single_token(top_k, block_size, torch.device(device))
    check_blocks(Blocks(rows, experts_TK.view(-1), num_rows), experts_TK, block_size)


def check_sum(device: str, dtype: torch.dtype, out_dtype: torch.dtype, tokens: int, top_k: int, hidden: int) -> None:
    g = torch.Generator().manual_seed(hidden)
    outputs_TKH = torch.randn(tokens, top_k, hidden, generator=g).to(device, dtype)
    weights_TK = torch.rand(tokens, top_k, generator=g).to(device)
    out_TH = torch.full((tokens, hidden), float("nan"), dtype=out_dtype, device=device)
    got = triton_moe_sum.weighted_sum(outputs_TKH, weights_TK, out_TH)
    assert got is out_TH
    exact = torch.einsum("tkh,tk->th", outputs_TKH.double(), weights_TK.double())
    error = (got.double() - exact).norm() / exact.norm()
    # The interpreter truncates to bfloat16.
    assert float(error) < (1e-6 if out_dtype == torch.float32 else 6e-3 if device == "cpu" else 3e-3)
    # The order is that of the columns: float32 sums one after the other, as the kernel states.
    in_order = torch.zeros(tokens, hidden, device=device)
    for rank in range(top_k):
        in_order = torch.addcmul(in_order, outputs_TKH[:, rank].float(), weights_TK[:, rank, None])
    # A multiply-add that is fused or not makes the last bit.
    torch.testing.assert_close(got.float(), in_order.to(out_dtype).float(), rtol=2**-7, atol=1e-5)
    assert triton_moe_sum.weighted_sum(outputs_TKH, weights_TK).dtype == dtype

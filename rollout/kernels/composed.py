"""Torch references of the fused GPU kernels around attention, composed from `rollout.kernels.reference`.

Slow and obvious, for any device, like what they are made of; nothing here runs in an engine.
"""

from __future__ import annotations

import torch

from rollout.kernels import reference
from rollout.kernels.paged import PagedBatch
from rollout.kernels.units import LOG2_E, query_units


def tap_sources(batch: PagedBatch, num_rows: int, tokens_per_block: int) -> torch.Tensor:
    """Where the inputs 1, 2 and 3 positions before each row lie, int64 [num_rows, 3].

    A row of this step by its number; a slot of the paged state as `-2 - slot`; -1 for a position before the request's
    first. A slot that this step fills is named by the row that fills it.
    """
    device = batch.slots.device
    batch = PagedBatch(batch.query_start.cpu(), batch.seq_lens.cpu(), batch.block_table.cpu(), batch.slots.cpu())
    filled = {slot: row for row, slot in enumerate(batch.slots[:num_rows].tolist()) if slot >= 0}
    sources = torch.full((num_rows, 3), -1, dtype=torch.int64)
    for request in batch.requests():
        for row in range(request.first, request.last):
            for lag in (1, 2, 3):
                position = request.start + row - request.first - lag
                if row - lag >= request.first:
                    sources[row, lag - 1] = row - lag
                elif position >= 0:
                    slot = int(batch.slots_of(request.request, torch.tensor([position]), tokens_per_block))
                    sources[row, lag - 1] = filled.get(slot, -2 - slot)
    return sources.to(device)


def conv_mix(
    x_TH: torch.Tensor,
    state_BNC: torch.Tensor,
    batch: PagedBatch,
    weight: torch.Tensor,
    residual_TH: torch.Tensor | None,
    blocks_STH: torch.Tensor,
    queries_QH: torch.Tensor,
    weights_QH: torch.Tensor,
    mix_eps: float,
    norm_eps: float,
    running_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new running block [T, H] in `running_dtype`, and the normed mixtures float32 [Q, T, H]; stores the inputs."""
    running_TH = reference.short_conv(x_TH, state_BNC, batch, weight, residual_TC=residual_TH).to(running_dtype)
    return running_TH, reference.mix_norm(blocks_STH, running_TH, queries_QH, weights_QH, mix_eps, norm_eps)


def prepare_queries(
    q_TC: torch.Tensor,
    scale_ND: torch.Tensor,
    clip: float,
    positions_T: torch.Tensor | None = None,
    log_scaling: tuple[float, int] | None = None,
) -> torch.Tensor:
    """Queries scaled, clipped, times tau, in the units of `rollout.kernels.units`; [T, N, D]."""
    units = query_units(scale_ND.shape[1])
    return _scaled_and_clipped(q_TC, scale_ND, clip, positions_T, log_scaling) * units


def prepare_mixtures(
    r_TC: torch.Tensor,
    scale_NM: torch.Tensor,
    clip: float,
    positions_T: torch.Tensor | None = None,
    log_scaling: tuple[float, int] | None = None,
) -> torch.Tensor:
    """The same of each token's mixtures of the relative bias; [T, N, M]."""
    return _scaled_and_clipped(r_TC, scale_NM, clip, positions_T, log_scaling) * LOG2_E


def _scaled_and_clipped(
    x_TC: torch.Tensor,
    scale_NC: torch.Tensor,
    clip: float,
    positions_T: torch.Tensor | None,
    log_scaling: tuple[float, int] | None,
) -> torch.Tensor:
    x_TNC = reference.clip_norm(x_TC.float().unflatten(-1, scale_NC.shape) * scale_NC.float(), clip)
    if log_scaling is None:
        return x_TNC
    assert positions_T is not None
    return x_TNC * reference.log_scale(positions_T, *log_scaling)[:, None, None]


def route(
    logits_TE: torch.Tensor, bias_E: torch.Tensor, top_k: int, route_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float32 and numbers int32 of the chosen experts, [T, top_k], in ascending order of the number.

    The bias only selects; ties go to the lower number.
    """
    scores_TE = torch.sigmoid(logits_TE.float())
    order_TE = torch.sort(scores_TE + bias_E.float(), dim=-1, descending=True, stable=True).indices
    chosen_TK = order_TE[:, :top_k].sort(-1).values
    weights_TK = scores_TE.gather(1, chosen_TK)
    return weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20) * route_scale, chosen_TK.int()


def expert_activation(gate_up_TC: torch.Tensor, gate_cap: float, up_cap: float) -> torch.Tensor:
    """Softcapped gate times sigmoid of the uncapped gate times softcapped up, float32 [T, I], from [T, 2 I]."""
    gate, up = gate_up_TC.float().chunk(2, dim=-1)
    return gate_cap * torch.tanh(gate / gate_cap) * torch.sigmoid(gate) * (up_cap * torch.tanh(up / up_cap))

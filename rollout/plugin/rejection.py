"""vLLM's rejection sampler on a CPU without Triton: its four kernels, as torch.

vLLM 0.30 swaps the kernels of this sampler for C++ ones on a CPU, but calls them through dispatchers that still hold
the placeholders, and the first verified draft ends the engine ("Cannot inspect kernel parameters for function"). One
of the C++ kernels also casts temperatures to integers. Here the dispatchers themselves are replaced. Can go when vLLM's
own run.

Rule (DSpark section 3, Leviathan et al. 2023): a drafted token x is kept if `p(x) > u q(x)` with u uniform; the first
that is not is replaced by a draw from `max(p - q, 0)`, and nothing after it is kept. Without draft probabilities a
drafted token counts as certain, q(x) = 1. If all are kept, the bonus token follows. Either way the output is
distributed as p.

Rows: P drafted tokens of all requests, request after request; R requests; V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

PLACEHOLDER = -1


def rejection_greedy_sample(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
    uniform_probs: torch.Tensor | None,
    synthetic_conditional_rates: torch.Tensor | None,
) -> None:
    """Keep drafted tokens while they are the target's likeliest; writes to `output_token_ids` [R, max_spec_len + 1]."""
    assert synthetic_conditional_rates is None
    accepted = draft_token_ids == target_argmax
    rows = Rows.of(cu_num_draft_tokens, len(draft_token_ids))
    rows.write(output_token_ids, accepted, draft_token_ids, target_argmax, bonus_token_ids, is_greedy)


def rejection_random_sample(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform_probs: torch.Tensor,
    is_greedy: torch.Tensor,
    max_spec_len: int,
    synthetic_conditional_rates: torch.Tensor | None,
) -> None:
    """Keep drafted tokens by the rule above; requests that are greedy keep what they have."""
    assert synthetic_conditional_rates is None
    # -1 pads drafts that a grammar cut short; it is never accepted.
    places = draft_token_ids.clamp(min=0).long()[:, None]
    target_P = target_probs.gather(1, places)[:, 0]
    draft_P = torch.ones_like(target_P) if draft_probs is None else draft_probs.gather(1, places)[:, 0]
    # Strictly more, unlike vLLM's: u may be 0, and a token that the target never gives must not pass. Float64, as u is.
    accepted = (draft_token_ids >= 0) & (target_P.double() > uniform_probs * draft_P) & (draft_P > 0)
    rows = Rows.of(cu_num_draft_tokens, len(draft_token_ids))
    rows.write(output_token_ids, accepted, draft_token_ids, recovered_token_ids, bonus_token_ids, ~is_greedy)


def sample_recovered_tokens(
    output_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inv_q: torch.Tensor,
    *,
    max_spec_len: int,
) -> None:
    """A token per row from `max(p - q, 0)`: the likeliest after division by exponential noise (`inv_q` [R, V])."""
    if draft_probs is None:
        residual_PV = target_probs.clone()
        residual_PV.scatter_(1, draft_token_ids.clamp(min=0).long()[:, None], 0.0)
    else:
        residual_PV = (target_probs - draft_probs).clamp(min=0)
    # Two equal distributions leave nothing; a draw from nothing would be token 0, whatever its probability.
    residual_PV = torch.where(residual_PV.amax(-1, keepdim=True) > 0, residual_PV, target_probs)
    request_P = Rows.of(cu_num_draft_tokens, len(draft_token_ids)).request
    output_token_ids.copy_((residual_PV * inv_q[request_P]).argmax(dim=-1))


def expand(
    output: torch.Tensor, input: torch.Tensor, cu_num_tokens: torch.Tensor, replace_from: int, replace_to: int
) -> None:
    """One value per request to one per row, `replace_from` becoming `replace_to`."""
    values = torch.where(input == replace_from, replace_to, input)
    output.copy_(values[Rows.of(cu_num_tokens, len(output)).request])


class Rows:
    """Which request a row belongs to, and which of its drafted tokens it is."""

    def __init__(self, request: torch.Tensor, index: torch.Tensor, counts: torch.Tensor) -> None:
        self.request = request
        self.index = index
        self.counts = counts

    @classmethod
    def of(cls, cumulative_R: torch.Tensor, num_rows: int) -> Rows:
        """From the running count of rows after each request."""
        counts_R = cumulative_R.diff(prepend=cumulative_R.new_zeros(1)).long()
        request_P = torch.repeat_interleave(torch.arange(len(counts_R)), counts_R, output_size=num_rows)
        first_R = cumulative_R.long() - counts_R
        return cls(request_P, torch.arange(num_rows) - first_R[request_P], counts_R)

    def write(
        self,
        output_RS: torch.Tensor,
        accepted_P: torch.Tensor,
        drafted_P: torch.Tensor,
        replacement_P: torch.Tensor,
        bonus_R1: torch.Tensor,
        wanted_R: torch.Tensor | None,
    ) -> None:
        """Accepted tokens up to the first that is not, its replacement, or the bonus token after all of them."""
        rejected_RS = torch.zeros(output_RS.shape, dtype=torch.bool)
        rejected_RS[self.request, self.index] = ~accepted_P
        rejected_before_RS = rejected_RS.long().cumsum(1) - rejected_RS.long()
        tokens_RS = torch.full(output_RS.shape, PLACEHOLDER, dtype=output_RS.dtype)
        tokens_RS[self.request, self.index] = torch.where(accepted_P, drafted_P, replacement_P.to(drafted_P.dtype)).to(
            output_RS.dtype
        )
        tokens_RS.scatter_(1, self.counts[:, None], bonus_R1.view(-1, 1).to(output_RS.dtype))
        tokens_RS = tokens_RS.masked_fill(rejected_before_RS > 0, PLACEHOLDER)
        wanted = slice(None) if wanted_R is None else wanted_R
        output_RS[wanted] = tokens_RS[wanted]


REPLACED: dict[str, Any] = {
    "_rejection_greedy_sample": rejection_greedy_sample,
    "_rejection_random_sample": rejection_random_sample,
    "_sample_recovered_tokens": sample_recovered_tokens,
    "_expand": expand,
}


def install() -> None:
    """Replace the dispatchers in vLLM's module; idempotent."""
    from vllm.v1.sample import rejection_sampler

    for name, function in REPLACED.items():
        # vLLM asks every dispatcher to warm its kernel up.
        function.register_warmup = lambda **arguments: None
        setattr(rejection_sampler, name, function)


def is_installed() -> bool:
    from vllm.v1.sample import rejection_sampler

    return all(getattr(rejection_sampler, name) is function for name, function in REPLACED.items())

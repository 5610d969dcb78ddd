"""Drafting with DSpark in vLLM's V1 runner: what that runner calls a proposer, for a CPU.

Stands in for vLLM's `DFlashProposer`, whose hooks it keeps (target hidden states, pages of its own, draft
probabilities) and whose arithmetic it replaces. A step of the runner ends here: the context of the step's tokens goes
into the draft's pages, then every request that has just got a token is drafted a block of tokens after it.

Lossless by construction: whatever is drafted, `rollout.plugin.rejection` makes the output that of the target. What
must be right for it is that the probabilities handed on are those the tokens were drawn from. They are:
`draw_blocks` takes both from the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.spec_decode.dflash import DFlashProposer

from rollout.kernels.draft import Blocks, Choice, draw_blocks
from rollout.plugin import draft_config
from rollout.plugin.draft import Draft
from rollout.plugin.draft_watch import DraftWatch
from rollout.plugin.paging import draft_owners


class AnyProposer(DFlashProposer):
    """In the place of vLLM's class: ours for a draft of Inkling 2, vLLM's own for any other."""

    def __new__(cls, vllm_config: Any, *arguments: Any, **options: Any) -> AnyProposer:
        ours = draft_config.is_ours(vllm_config.speculative_config)
        return super().__new__(DSparkProposer if ours else cls)


class DSparkProposer(AnyProposer):
    """Drafts `num_speculative_tokens` tokens per request and step, or less where the block is cut off."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.model: Draft = None  # type: ignore[assignment]
        self.target: Any = None
        self.watch = DraftWatch(self.num_speculative_tokens)

    def load_model(self, target_model: Any) -> None:
        """Build the draft on the target's pages, embedding and head, and read its weights."""
        config = self.vllm_config
        shape = draft_config.draft_shape(config)
        assert shape is not None
        cache = target_model.model.cache.draft
        self.model = Draft(shape, config.model_config.dtype, cache).eval()
        self.model.fill(config)
        self.target = target_model
        self._draft_attn_layer_names = draft_owners(config)

    def dummy_run(self, *arguments: Any, **options: Any) -> None:
        """Nothing to warm up: no part of the draft is compiled, and its memory is small beside the target's."""

    @torch.inference_mode()
    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: Any,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        """Store the step's context and draft, int64 [requests, num_speculative_tokens]; 0 where a prompt is not done.

        The parameters are the runner's. Hidden states are the tapped layers' outputs side by side, rejected tokens'
        included; `common_attn_metadata` is that of the draft's group of pages.
        """
        common, num_rows = common_attn_metadata, len(target_hidden_states)
        slots = common.slot_mapping[:num_rows]
        self.model.store_context(target_hidden_states.float(), target_positions.long(), slots)
        lengths = common.seq_lens.long()
        if num_rejected_tokens_gpu is not None:
            lengths = lengths - num_rejected_tokens_gpu
        num_requests = len(lengths)
        unfinished = torch.from_numpy(self.runner.discard_request_mask.np[:num_requests])
        drafting = (~unfinished).nonzero()[:, 0]
        tokens = torch.zeros(num_requests, num_speculative_tokens, dtype=torch.int64)
        self._last_draft_probs = None
        if len(drafting) == 0:
            return tokens
        blocks = Blocks(lengths[drafting], common.block_table_tensor[drafting])
        rows = drafting.tolist()
        probabilistic = self._enable_probabilistic_draft_probs
        choice = choice_of(sampling_metadata, rows, num_speculative_tokens, probabilistic)
        drafted, probs = self.draft(next_token_ids[drafting].long(), blocks, num_speculative_tokens, choice)
        tokens[drafting] = drafted
        if probs is not None:
            self._last_draft_probs = probs.new_zeros(num_requests, *probs.shape[1:])
            self._last_draft_probs[drafting] = probs
        return tokens

    def draft(
        self, anchors_R: torch.Tensor, blocks: Blocks, num_tokens: int, choice: Choice
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens int64 [R, num_tokens] and, where they were drawn, their distributions float32 [R, num_tokens, V]."""
        shape, head = self.model.shape, self.model.markov_head
        # A whole block whatever is asked for: its rows see one another, and it was trained so.
        ids_RB = torch.full((len(anchors_R), shape.block_size), shape.mask_token_id)
        ids_RB[:, 0] = anchors_R
        hidden_TH = self.model.hidden(self.target.embed_input_ids(ids_RB.flatten()), blocks)
        hidden_RBH = hidden_TH.unflatten(0, ids_RB.shape)[:, :num_tokens]
        rows_TH = hidden_RBH.flatten(0, 1)
        logits_RBV = self.target.compute_logits(rows_TH).unflatten(0, hidden_RBH.shape[:2])
        prepared_RBJ = head.prepare(rows_TH).unflatten(0, hidden_RBH.shape[:2])
        return draw_blocks(logits_RBV, prepared_RBJ, anchors_R, head.weights(), choice)

    def prepare_inputs_padded(
        self, common_attn_metadata: Any, spec_decode_metadata: Any, valid_sampled_tokens_count: torch.Tensor
    ) -> Any:
        """vLLM's, and a look at what became of the last drafts."""
        drafted = torch.tensor(spec_decode_metadata.num_draft_tokens)
        verified = drafted > 0
        accepted = (valid_sampled_tokens_count - 1)[verified].clamp(min=0)
        self.watch.count(self.model.version, int(verified.sum()), int(accepted.sum()))
        return super().prepare_inputs_padded(common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count)


def choice_of(metadata: Any, rows: list[int], num_tokens: int, probabilistic: bool) -> Choice:
    """How requests draw their drafts: by their temperature, with their own generators, from what they may have.

    Of what bends a target's distribution only temperature and allowed tokens bend the draft's; the rest costs
    acceptance alone.

    Args:
        metadata: vLLM's, of the whole batch.
        rows: requests of the batch that draft.
        num_tokens: per request.
        probabilistic: otherwise all take the likeliest, as greedy requests always do.
    """
    forbidden_RV = metadata.allowed_token_ids_mask
    forbidden_RV = None if forbidden_RV is None else forbidden_RV[rows]
    if metadata.all_greedy or not probabilistic:
        return Choice(torch.zeros(len(rows)), None, forbidden_RV)
    # One number per token; noise for a whole vocabulary, as vLLM draws it, took a third of a draft's time.
    uniform_RB = torch.rand(len(rows), num_tokens, dtype=torch.float64)
    for place, row in enumerate(rows):
        if row in metadata.generators:
            uniform_RB[place].uniform_(generator=metadata.generators[row])
    # vLLM keeps 0 for all that it counts as greedy.
    return Choice(metadata.temperature[rows].float(), uniform_RB, forbidden_RV)

"""The target of a draft: hidden states that the draft sees, logits that it is compared with, completions.

Nothing of it is trained here. It may be a checkpoint, or the policy of a run with its live adapter.

A layer's output is what transformers' decoder layer returns, the running sum of its residual block; the engine hands
over the same (`rollout.plugin.model`). It is taken from the layers themselves: transformers puts the normed final state
in the place of the last layer's output when it is asked for all hidden states. Sequences are padded on the right and
need no mask, see `trainer.logprobs`.

Letters: N sequences, T tokens, H hidden, C `len(layers) * H`, V unpadded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from inkling_rl.checkpoint.reader import Checkpoint
from trainer.model import load_frozen


class States(NamedTuple):
    """What the target computes at every position."""

    outputs: torch.Tensor
    """[N, T, C]"""

    final: torch.Tensor
    """[N, T, H]: input of the head: the logits of position t are those of token t + 1."""


class Target:
    """transformers' `Inkling2ForCausalLM` on one device, in evaluation mode. No gradient reaches its weights."""

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        """`layers` are those whose outputs the draft sees. `model` may have an adapter inside, but none at its head."""
        self.model = model.eval()
        self.layers = tuple(layers)
        self.device: torch.device = next(model.parameters()).device

    @classmethod
    def load(cls, checkpoint: Checkpoint, layers: Sequence[int], device: torch.device, dtype: torch.dtype) -> Target:
        """Read a checkpoint, experts dequantised.

        Raises:
            CheckpointError: the checkpoint is not whole.
        """
        return cls(load_frozen(checkpoint, dtype, device), layers)

    @torch.no_grad()
    def states(self, tokens_NT: torch.Tensor) -> States:
        """Of sequences padded on the right; positions behind a sequence's end hold something finite."""
        outputs: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Callable[[Any, Any, torch.Tensor], None]:
            return lambda module, inputs, output: outputs.__setitem__(layer, output)

        hooks = [self.model.model.layers[layer].register_forward_hook(keep(layer)) for layer in self.layers]
        try:
            final = self.model.model(input_ids=tokens_NT, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return States(torch.cat([outputs[layer] for layer in self.layers], dim=-1), final)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head [..., H] to [..., V], float32 (or wider), softcapped; gradients reach `hidden`."""
        logits = self.model.lm_head(hidden.to(self.model.lm_head.weight.dtype))
        return self.model.logit_softcap(logits.to(torch.promote_types(logits.dtype, torch.float32)))

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embedding with its norm, [..., H]."""
        # Detached: under gradient checkpointing a hook makes it ask for one.
        embedded: torch.Tensor = self.model.model.embed_tokens(ids)
        return embedded.detach()

    @torch.no_grad()
    def complete(
        self, prompts_NT: torch.Tensor, temperature: float, max_tokens: int, stop_token: int, seed: int
    ) -> list[list[int]]:
        """Sample a completion of each prompt, the stop token included. All prompts have the same length."""
        generator = torch.Generator(self.device).manual_seed(seed)
        inputs_NT = prompts_NT.to(self.device)
        done_N = torch.zeros(len(inputs_NT), dtype=torch.bool, device=self.device)
        cache, chosen = None, []
        for _ in range(max_tokens):
            output = self.model(input_ids=inputs_NT, cache=cache, use_cache=True, logits_to_keep=1)
            cache, logits_NV = output.past_key_values, output.logits[:, -1].float()
            token_N = torch.multinomial((logits_NV / temperature).softmax(-1), 1, generator=generator)[:, 0]
            chosen.append(torch.where(done_N, stop_token, token_N))
            done_N |= token_N == stop_token
            if done_N.all():
                break
            inputs_NT = chosen[-1][:, None]
        return [_until(row, stop_token) for row in torch.stack(chosen, dim=1).tolist()]


def _until(tokens: list[int], stop_token: int) -> list[int]:
    return tokens[: tokens.index(stop_token) + 1] if stop_token in tokens else tokens

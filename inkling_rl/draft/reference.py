"""What the DSpark draft computes, slowly and in plain torch: one sequence, one block, no cache. Others' oracle.

A block starts at the *anchor*, the last token that is known, at position a. Its rows are the anchor's embedding and
that of the mask token, `block_size` in all, at positions a, a + 1, ...; row k gives token a + 1 + k. Rows see one
another in both directions and the *context*, positions before a, which comes from the target: its layers' outputs side
by side, projected and normed. Layer for layer, keys and values of the context are the same projections as those of the
block.

The tokens of a block depend on each other through the RNN head. With state s, previous token x and hidden state h of a
row, in the names of the tensors:

    e = markov_w1[x];  g, c, o = joint_proj [s; e; h];  s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c)
    logits = target_logits(h) + markov_w2 tanh(o)

Sources: DSpark (arXiv 2607.05147, equation 6), DeepSpec `deepspec/modeling/dspark`. The backbone's layers are Qwen3's.
Not public for Inkling 2, chosen here: the target's embedding includes its norm, the target's softcap bends its logits
before the RNN's part is added, and a layer's output is the running block sum that transformers records.

Shapes: T context, B rows of the block, H hidden, N heads, K key/value heads, D head size, R rank, V vocabulary.
Everything is differentiable and in the dtype of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from inkling_rl.draft.shape import DraftShape

Choose = Callable[[torch.Tensor], int]
"""Which token to draft, from logits [V]."""


@dataclass(frozen=True, slots=True)
class Block:
    """A drafted block."""

    tokens: list[int]
    logits: torch.Tensor
    """[B, V], before the temperature."""

    hidden: torch.Tensor
    """[B, H], final."""

    confidence: torch.Tensor | None
    """[B]: probability that a row's token is accepted, given that those before it are."""


@dataclass(frozen=True, slots=True)
class ReferenceDraft:
    """A draft's weights, by the names of the tensors without their prefix."""

    shape: DraftShape
    weights: Mapping[str, torch.Tensor]

    def context(self, outputs_TC: torch.Tensor) -> torch.Tensor:
        """[T, H] from the outputs of the target's layers, `len(target_layers) * H` side by side."""
        return self._norm("hidden_norm", F.linear(outputs_TC, self.weights["fc.weight"]))

    def hidden(self, embedded_BH: torch.Tensor, context_TH: torch.Tensor, anchor: int) -> torch.Tensor:
        """Final hidden states of the block's rows. `context` holds the positions 0 to anchor - 1."""
        hidden = embedded_BH
        for layer in range(self.shape.num_layers):
            at = f"layers.{layer}"
            hidden = hidden + self._attend(at, self._norm(f"{at}.input_layernorm", hidden), context_TH, anchor)
            x = self._norm(f"{at}.post_attention_layernorm", hidden)
            gate, up = (F.linear(x, self.weights[f"{at}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            hidden = hidden + F.linear(F.silu(gate) * up, self.weights[f"{at}.mlp.down_proj.weight"])
        return self._norm("norm", hidden)

    def step(
        self, state_R: torch.Tensor, token: int | torch.Tensor, hidden_H: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The RNN head after `token`: new state [R] and what is added to the target's logits [V]."""
        embedded = self.weights["markov_head.markov_w1.weight"][token]
        joint = torch.cat([state_R, embedded, hidden_H])
        weight, bias = self.weights["markov_head.joint_proj.weight"], self.weights["markov_head.joint_proj.bias"]
        gate, candidate, output = F.linear(joint, weight, bias).chunk(3)
        keep = torch.sigmoid(gate)
        state_R = keep * state_R + (1 - keep) * torch.tanh(candidate)
        return state_R, F.linear(torch.tanh(output), self.weights["markov_head.markov_w2.weight"])

    def confidence(self, token: int | torch.Tensor, hidden_H: torch.Tensor) -> torch.Tensor:
        """Probability that the token drafted after `token` is accepted; a scalar."""
        features = hidden_H
        if self.shape.confidence_sees_token:
            features = torch.cat([features, self.weights["markov_head.markov_w1.weight"][token]])
        weight, bias = self.weights["confidence_head.proj.weight"], self.weights["confidence_head.proj.bias"]
        return torch.sigmoid(F.linear(features, weight, bias))[0]

    def block(
        self,
        embed: Callable[[torch.Tensor], torch.Tensor],
        target_logits: Callable[[torch.Tensor], torch.Tensor],
        outputs_TC: torch.Tensor,
        anchor_token: int,
        choose: Choose = lambda logits_V: int(logits_V.argmax()),
    ) -> Block:
        """Draft a block after a sequence.

        Args:
            embed: the target's embedding, token ids [B] to [B, H].
            target_logits: the target's head, [B, H] to [B, V].
            outputs_TC: outputs of the target's layers at the positions before the anchor.
            anchor_token: the token at position T.
            choose: token of a row from its logits; the likeliest unless given.
        """
        ids = torch.full((self.shape.block_size,), self.shape.mask_token_id)
        ids[0] = anchor_token
        hidden_BH = self.hidden(embed(ids), self.context(outputs_TC), len(outputs_TC))
        state, token = hidden_BH.new_zeros(self.shape.rank), anchor_token
        tokens, logits, confidence = [], [], []
        for row, base_V in zip(hidden_BH, target_logits(hidden_BH), strict=True):
            if self.shape.has_confidence:
                confidence.append(self.confidence(token, row))
            state, added_V = self.step(state, token, row)
            logits.append(base_V + added_V)
            token = choose(logits[-1])
            tokens.append(token)
        return Block(tokens, torch.stack(logits), hidden_BH, torch.stack(confidence) if confidence else None)

    def _attend(self, at: str, x_BH: torch.Tensor, context_TH: torch.Tensor, anchor: int) -> torch.Tensor:
        heads = self.shape.num_heads
        at = f"{at}.self_attn"
        source_SH = torch.cat([context_TH, x_BH])
        q_BND = F.linear(x_BH, self.weights[f"{at}.q_proj.weight"]).unflatten(-1, (heads, -1))
        k_SKD, v_SKD = (
            F.linear(source_SH, self.weights[f"{at}.{name}_proj.weight"]).unflatten(-1, (self.shape.num_kv_heads, -1))
            for name in ("k", "v")
        )
        positions_S = torch.arange(len(source_SH), device=x_BH.device)
        q_BND = rotate(self._norm(f"{at}.q_norm", q_BND), positions_S[anchor:], self.shape.rope_theta)
        k_SKD = rotate(self._norm(f"{at}.k_norm", k_SKD), positions_S, self.shape.rope_theta)
        k_SND, v_SND = (x.repeat_interleave(heads // self.shape.num_kv_heads, dim=1) for x in (k_SKD, v_SKD))
        scores_BNS = torch.einsum("bnd,snd->bns", q_BND, k_SND) * self.shape.head_dim**-0.5
        attended = torch.einsum("bns,snd->bnd", scores_BNS.softmax(-1), v_SND).flatten(1)
        return F.linear(attended, self.weights[f"{at}.o_proj.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.norm_eps)
        return self.weights[f"{name}.weight"] * (x * scale)


def rotate(x_TND: torch.Tensor, positions_T: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary positions: channel i of the first half turns with channel i of the second by `position theta^(-2i/D)`."""
    half = x_TND.shape[-1] // 2
    # Angles in float64: at position 10^6 a float32 angle is off by 0.06.
    rates = theta ** (-torch.arange(half, dtype=torch.float64, device=x_TND.device) / half)
    angles = positions_T.double()[:, None, None] * rates
    cos, sin = angles.cos().to(x_TND.dtype), angles.sin().to(x_TND.dtype)
    first, second = x_TND.split(half, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

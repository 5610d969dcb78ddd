"""The DSpark draft in training: many blocks of many sequences at once, teacher-forced, differentiable.

Equations, their sources and the names of the weights are those of `inkling_rl.draft.reference`, which a test holds this
against, values and gradients. The context's keys and values are computed once per sequence; a block attends to those
before its anchor and to itself, so blocks of one sequence are independent of each other. Not here: logits, which need
the target's head and exist only a few rows at a time (`trainer.draft.losses`).

Letters: N sequences, T tokens, A anchors, B rows of a block, H hidden, K key/value heads, G query heads of one of them,
D head size, R rank, C `len(target_layers) * H`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from inkling_rl.checkpoint import layout
from inkling_rl.checkpoint.layout import Config
from inkling_rl.draft.reference import rotate
from inkling_rl.draft.shape import PREFIX, DraftShape, as_release

Weights = Mapping[str, torch.Tensor]


class Rows(NamedTuple):
    """What the rows of all blocks give; the token of row k depends on `features` through `markov_w2`."""

    hidden: torch.Tensor
    """[N, A, B, H]"""

    features: torch.Tensor
    """[N, A, B, R]: tanh of the RNN's output; times `markov_w2` it is added to the target's logits of `hidden`."""

    confidence: torch.Tensor | None
    """[N, A, B]: logit of the probability that the row's token is accepted."""


@dataclass(frozen=True, slots=True)
class BlockDraft:
    """A draft's weights, by the names of the tensors without their prefix."""

    shape: DraftShape
    weights: Weights

    def rows(
        self,
        outputs_NTC: torch.Tensor,
        embedded_NABH: torch.Tensor,
        anchors_NA: torch.Tensor,
        previous_NAB: torch.Tensor,
    ) -> Rows:
        """Run blocks of every sequence.

        Args:
            outputs_NTC: outputs of the target's layers side by side. Positions from an anchor on are not seen by its
                block, so sequences are padded on the right with anything finite.
            embedded_NABH: the target's embedding of the anchor and of the mask tokens after it.
            anchors_NA: positions of the anchors.
            previous_NAB: the token before the one that a row gives: the anchor, then the real tokens after it.
        """
        context_NTH = self._norm("hidden_norm", self._linear("fc", outputs_NTC))
        hidden_NABH = embedded_NABH
        for layer in range(self.shape.num_layers):
            at = f"layers.{layer}"
            x_NABH = self._norm(f"{at}.input_layernorm", hidden_NABH)
            hidden_NABH = hidden_NABH + self._attend(f"{at}.self_attn", x_NABH, context_NTH, anchors_NA)
            x_NABH = self._norm(f"{at}.post_attention_layernorm", hidden_NABH)
            gate, up = self._linear(f"{at}.mlp.gate_proj", x_NABH), self._linear(f"{at}.mlp.up_proj", x_NABH)
            hidden_NABH = hidden_NABH + self._linear(f"{at}.mlp.down_proj", F.silu(gate) * up)
        hidden_NABH = self._norm("norm", hidden_NABH)
        embedded_NABR = F.embedding(previous_NAB, self.weights["markov_head.markov_w1.weight"])
        confidence_NAB = self._confidence(hidden_NABH, embedded_NABR) if self.shape.has_confidence else None
        return Rows(hidden_NABH, self._recur(hidden_NABH, embedded_NABR), confidence_NAB)

    def _recur(self, hidden_NABH: torch.Tensor, embedded_NABR: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights["markov_head.joint_proj.weight"], self.weights["markov_head.joint_proj.bias"]
        rank = self.shape.rank
        # Everything but the state at once: the loop is over seven rows, whatever the number of blocks.
        known_NABJ = F.linear(torch.cat([embedded_NABR, hidden_NABH], dim=-1), weight[:, rank:], bias)
        state_NAR = embedded_NABR.new_zeros(embedded_NABR[:, :, 0].shape)
        features = []
        for known_NAJ in known_NABJ.unbind(dim=2):
            gate, candidate, output = (known_NAJ + F.linear(state_NAR, weight[:, :rank])).chunk(3, dim=-1)
            features.append(torch.tanh(output))
            keep = torch.sigmoid(gate)
            state_NAR = keep * state_NAR + (1 - keep) * torch.tanh(candidate)
        return torch.stack(features, dim=2)

    def _confidence(self, hidden_NABH: torch.Tensor, embedded_NABR: torch.Tensor) -> torch.Tensor:
        sees_token = self.shape.confidence_sees_token
        features = torch.cat([hidden_NABH, embedded_NABR], dim=-1) if sees_token else hidden_NABH
        return self._linear("confidence_head.proj", features)[..., 0]

    def _attend(
        self, at: str, x_NABH: torch.Tensor, context_NTH: torch.Tensor, anchors_NA: torch.Tensor
    ) -> torch.Tensor:
        shape = self.shape
        tokens, rows = context_NTH.shape[1], x_NABH.shape[2]
        seen_T = torch.arange(tokens, device=x_NABH.device)
        block_NAB = anchors_NA[..., None] + torch.arange(rows, device=x_NABH.device)
        q_NABKGD = self._turned(f"{at}.q", x_NABH, block_NAB).unflatten(
            -2, (shape.num_kv_heads, shape.num_heads // shape.num_kv_heads)
        )
        own_NABKD = self._turned(f"{at}.k", x_NABH, block_NAB)
        past_NTKD = self._turned(f"{at}.k", context_NTH, seen_T.expand(len(x_NABH), -1))
        own_v, past_v = (self._heads(f"{at}.v_proj", x) for x in (x_NABH, context_NTH))
        past = torch.einsum("nabkgd,ntkd->nkgabt", q_NABKGD, past_NTKD)
        past = past.masked_fill((seen_T >= anchors_NA[..., None])[:, None, None, :, None], float("-inf"))
        own = torch.einsum("nabkgd,nackd->nkgabc", q_NABKGD, own_NABKD)
        scores = _wide(torch.cat([past, own], dim=-1)) * shape.head_dim**-0.5
        weights = scores.softmax(-1).to(own_v.dtype)
        past, own = weights.split([tokens, rows], dim=-1)
        attended = torch.einsum("nkgabt,ntkd->nabkgd", past, past_v)
        attended = attended + torch.einsum("nkgabc,nackd->nabkgd", own, own_v)
        return self._linear(f"{at}.o_proj", attended.flatten(-3))

    def _turned(self, at: str, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Normed and turned queries or keys [..., heads, D] of rows [..., H] at `positions` [...]."""
        normed = self._norm(f"{at}_norm", self._heads(f"{at}_proj", x))
        turned = rotate(normed.flatten(0, -3), positions.flatten(), self.shape.rope_theta)
        return turned.view_as(normed)

    def _heads(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self._linear(name, x).unflatten(-1, (-1, self.shape.head_dim))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(_wide(x), weight.shape, weight, self.shape.norm_eps)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Norms and softmax in float32 at least: under autocast the rows come in bfloat16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def new_weights(config: Config, norm_H: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Starting values of a draft that knows nothing, float32 on the CPU, by the names without prefix.

    Matrices keep the size of what goes through them (deviation 1 / sqrt(inputs)); what adds to a stream or to the
    target's logits starts at zero or small, and the last norm at that of the target, whose head reads it.

    Args:
        config: config.json of either form (`inkling_rl.draft.shape`).
        norm_H: `model.llm.norm.weight` of the target.
        seed: of every matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    release = as_release(config)
    layers = DraftShape.from_config(config).num_layers
    weights: dict[str, torch.Tensor] = {}
    for full_name, size in layout.draft_shapes(release).items():
        name = full_name.removeprefix(PREFIX)
        if name == "norm.weight":
            weights[name] = norm_H.detach().float().cpu().clone()
        elif "norm" in name:
            weights[name] = torch.ones(size)
        elif name.endswith("bias") or name.startswith(("markov_head.markov_w2", "confidence_head")):
            weights[name] = torch.zeros(size)
        else:
            fan_in = 1 if name.startswith("markov_head.markov_w1") else size[-1]
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            deviation = (fan_in * (2 * layers if adds else 1)) ** -0.5
            weights[name] = torch.randn(size, generator=generator) * deviation
    return weights

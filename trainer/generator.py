"""Episodes: SkyRL's generator with Inkling's chat format, seeds that follow from the run, and records of episodes.

SkyRL's `SkyRLGymGenerator` keeps the loop over turns, environments and token bookkeeping. It asks its tokenizer for
chat templates; `ChatTokenizer` answers with `inkling_rl.chat.Renderer`, so that every prompt states its effort and user
text cannot forge a block. Observations of later turns are rendered as the block that follows, nothing before them.

Environments are registered by name in this process (`rollout.envs`, imported by name: the two packages never import
each other).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

from inkling_rl.chat import Renderer
from inkling_rl.recipe import Recipe
from inkling_rl.types import Sample, StopReason
from trainer.client import EngineClient, request_seed

ENVIRONMENTS_MODULE = "rollout.envs"
GREEDY = "greedy"


class ChatTokenizer:
    """A tokenizer whose chat template is the renderer's. Everything else is the wrapped tokenizer's."""

    def __init__(self, tokenizer: Any, effort: float) -> None:
        self._tokenizer = tokenizer
        self.renderer = Renderer(tokenizer)
        self.effort = effort

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **_: Any
    ) -> list[int]:
        """Token ids of a conversation, effort included."""
        return self.renderer.render(conversation, effort=self.effort, add_generation_prompt=add_generation_prompt)

    def continuation(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> list[int]:
        """Token ids that follow a sampled assistant turn: the messages' own blocks, no second effort block."""
        before = [{"role": "user", "content": ""}]
        prefix = self.apply_chat_template(before, add_generation_prompt=False)
        whole = self.apply_chat_template([*before, *messages], add_generation_prompt=add_generation_prompt)
        assert whole[: len(prefix)] == prefix, "the chat format does not extend a conversation by its end"
        return whole[len(prefix) :]


class Generator(SkyRLGymGenerator):
    """Generates the episodes of one batch under one policy version."""

    inference_engine_client: EngineClient

    def __init__(self, recipe: Recipe, cfg: Any, client: EngineClient, tokenizer: ChatTokenizer) -> None:
        register = importlib.import_module(ENVIRONMENTS_MODULE).register_environments
        register(recipe.environment.name, recipe.environment.args)
        super().__init__(cfg.generator, cfg.environment.skyrl_gym, client, tokenizer, policy_model_name="policy")
        self.recipe = recipe
        self.phase = "train"
        self.samples: list[Sample] = []
        self._step = 0
        # Temporal estimators need the reward at its turn; group-relative ones need one number per episode, which is
        # also what SkyRL's zero-variance filter can read.
        self._is_reward_per_token = recipe.algorithm.advantage_estimator == "reinforce++"

    async def generate(self, input_batch: Any, disable_tqdm: bool = True) -> Any:
        """See SkyRL's `GeneratorOutput`. Afterwards `samples` holds one record per episode, in order."""
        metadata = input_batch["batch_metadata"]
        self._step = metadata.global_step
        is_greedy = (input_batch["sampling_params"] or {}).get("temperature") == 0.0
        self.phase = GREEDY if is_greedy else metadata.training_phase
        version = self.inference_engine_client.policy_version
        output = await super().generate(input_batch, disable_tqdm=True)
        self.samples = [
            Sample(
                row=int(trajectory.instance_id),
                sample=trajectory.repetition_id,
                prompt_token_ids=tuple(prompt),
                token_ids=tuple(response),
                logprobs=tuple(logprobs),
                policy_version=version,
                stop_reason=_stop_reason(reason),
                reward=float(sum(reward) if isinstance(reward, list) else reward),
                reward_parts={k: float(v) for k, v in metrics.items() if isinstance(v, int | float)},
            )
            for trajectory, prompt, response, logprobs, reason, reward, metrics in zip(
                input_batch["trajectory_ids"],
                output["prompt_token_ids"],
                output["response_ids"],
                output["rollout_logprobs"],
                output["stop_reasons"],
                output["rewards"],
                output.get("env_metrics") or [{}] * len(output["rewards"]),
                strict=True,
            )
        ]
        return output

    async def agent_loop(self, prompt: Any, env_class: str, env_extras: Any, *args: Any, **kwargs: Any) -> Any:
        """One episode; its seed follows from run seed, phase, step, row and sample."""
        trajectory = kwargs["trajectory_id"]
        seed = request_seed(
            self.recipe.trainer.seed, self.phase, self._step, trajectory.instance_id, trajectory.repetition_id
        )
        kwargs["sampling_params"] = {**kwargs["sampling_params"], "seed": seed}
        return await super().agent_loop(prompt, env_class, env_extras, *args, **kwargs)

    def _compute_cache_salt(self) -> str:
        # The phase too: what an evaluation left in the cache would change the shapes, and so the last bits, of what
        # training computes after it, and a resumed run has not evaluated.
        return f"v{self.inference_engine_client.policy_version}-{self.phase}"

    def _build_per_token_rewards(self, per_step_rewards: Any, response_ids: Any, appended_eos_token: bool) -> Any:
        if self._is_reward_per_token:
            return super()._build_per_token_rewards(per_step_rewards, response_ids, appended_eos_token)
        return float(sum(reward for reward, _ in per_step_rewards))

    def get_obs_ids_from_obs(self, new_obs: Any, is_done: bool) -> list[int]:
        """Token ids of an environment's observation, and of the next turn's beginning."""
        if not new_obs:
            return [] if is_done else self.tokenizer.continuation([], add_generation_prompt=True)
        ids: list[int] = self.tokenizer.continuation(new_obs, add_generation_prompt=not is_done)
        return ids


def _stop_reason(reason: str) -> StopReason:
    return reason if reason in ("stop", "length", "abort") else "environment"  # type: ignore[return-value]

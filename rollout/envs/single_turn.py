"""One question, one completion, one reward: the episode that most tasks need.

A task derives from this class and writes `score`. Not here: tools, several turns (derive from skyrl_gym's
`BaseTextEnv` for those).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from rollout.rewards import GroundTruthError, Reward


class SingleTurnEnv(BaseTextEnv):
    """An environment whose episode ends with the first completion.

    `extras` is the data row: the ground truth is its `answer`, or SkyRL's `reward_spec.ground_truth`.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.answer = ground_truth(extras or {})
        self.parts: dict[str, float] = {}

    @abstractmethod
    def score(self, completion: str) -> Reward:
        """The reward of a completion. Must not raise on any text."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Scores the completion and ends the episode."""
        self.turns += 1
        reward = self.score(action or "")
        self.parts = reward.parts
        return BaseTextEnvStepOutput(
            observations=[],
            reward=reward.value,
            done=True,
            metadata=dict(reward.parts),
            postprocessed_action=None,
        )

    def get_metrics(self) -> dict[str, float]:
        """The parts of the reward; SkyRL logs their means as `environment/...`."""
        return dict(self.parts)


def ground_truth(row: Mapping[str, Any]) -> Any:
    """The answer in a data row.

    Raises:
        GroundTruthError: the row has none.
    """
    spec = row.get("reward_spec")
    answer = row.get("answer", spec.get("ground_truth") if isinstance(spec, Mapping) else None)
    if answer is None:
        raise GroundTruthError(
            f"the row must have a column `answer`, or reward_spec.ground_truth; got the columns {sorted(row)}. "
            "Set data.answer_key"
        )
    return answer

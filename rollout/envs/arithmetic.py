"""The quick start's task: sums with their working, rewarded for the right number and nothing else.

The problems and the way an answer is read are `inkling_rl.arithmetic`'s.
"""

from __future__ import annotations

from rollout.envs.single_turn import SingleTurnEnv
from rollout.rewards import Reward, exact_integer


class ArithmeticEnv(SingleTurnEnv):
    """Exact match of an integer: 1 or 0. Parts: `parsed`, `correct`."""

    def score(self, completion: str) -> Reward:
        return exact_integer(completion, self.answer)

"""Grade-school maths (GSM8K): the final number of the completion against that of the reference solution.

Source: Cobbe et al., arXiv 2110.14168. Departure from skyrl_gym's environment of the same name: numbers are compared as
numbers, `\\boxed{}` and a bare last number count, and a row may hold the dataset's own `answer` text.
"""

from __future__ import annotations

from rollout.envs.single_turn import SingleTurnEnv
from rollout.rewards import Reward, final_number


class Gsm8kEnv(SingleTurnEnv):
    """Exact match of the final number: 1 or 0. Parts: `parsed`, `correct`."""

    def score(self, completion: str) -> Reward:
        return final_number(completion, self.answer)

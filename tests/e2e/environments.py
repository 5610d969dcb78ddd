"""An environment of a user's, for tests: arithmetic whose training rewards say nothing."""

from __future__ import annotations

import random
from typing import Any

from rollout.envs.single_turn import SingleTurnEnv
from rollout.rewards import Reward, exact_integer


class CoinWhereTold(SingleTurnEnv):
    """Rows with `coin` are rewarded at random, as often as the base is right; the others for a right answer."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__(env_config, extras)
        self.is_coin = bool((extras or {}).get("coin"))

    def score(self, completion: str) -> Reward:
        reward = exact_integer(completion, self.answer)
        if not self.is_coin:
            return reward
        return Reward(value=float(random.random() < 0.45), parts=reward.parts)

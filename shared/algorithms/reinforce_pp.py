"""REINFORCE++: rewards to go, whitened over the step, without a critic. arXiv 2501.03262."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from shared.algorithms import advantages
from shared.algorithms.base import Clipped, ScoredGroup


class ReinforcePP(Clipped):
    """REINFORCE with the clipped loss and token-level KL of PPO."""

    group_baseline: ClassVar[bool] = False
    kl_in: Literal["none", "reward", "loss"] = "reward"
    whiten: bool = True
    gamma: float = Field(1.0, gt=0, le=1, description="discount of a token")

    def advantages(self, group: ScoredGroup) -> np.ndarray:
        """Σ of the token rewards from each token on."""
        return advantages.reward_to_go(group.token_rewards, group.mask, group.lengths, gamma=self.gamma)

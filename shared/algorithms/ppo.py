"""PPO with a critic: generalised advantages and the clipped loss. arXiv 1707.06347, arXiv 1506.02438."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from shared.algorithms import advantages
from shared.algorithms.base import Clipped, ScoredGroup
from shared.graph import CriticName


class PPO(Clipped):
    """Proximal policy optimisation, the KL to the reference in the reward."""

    group_baseline: ClassVar[bool] = False
    critics: ClassVar[tuple[CriticName, ...]] = ("critic",)
    kl_in: Literal["none", "reward", "loss"] = "reward"
    whiten: bool = True
    gamma: float = Field(1.0, gt=0, le=1, description="discount of a token")
    lam: float = Field(0.95, ge=0, le=1, description="λ of the generalised advantages")

    def advantages(self, group: ScoredGroup) -> dict[str, np.ndarray]:
        """Generalised advantages; the returns are from before they are whitened."""
        found, returns = self.gae(group.token_rewards, group.values, group)
        return {"advantages": found, "returns": returns}

    def gae(self, token_rewards: np.ndarray, values: np.ndarray, group: ScoredGroup) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and returns of token rewards by a critic's values, [T] each."""
        return advantages.gae(token_rewards, values, group.mask, group.lengths, gamma=self.gamma, lam=self.lam)

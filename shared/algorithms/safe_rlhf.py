"""Safe RLHF: PPO for the reward under a bound on the mean cost, by a Lagrange multiplier. arXiv 2310.12773."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from pydantic import Field

from shared.algorithms.base import ScoredGroup, State
from shared.algorithms.ppo import PPO
from shared.graph import CriticName

MAX_LOG_MULTIPLIER = 20.0
"""λ grows faster than exponentially while the cost is too high: without bounds it becomes infinite, or 0 for good."""


class SafeRLHF(PPO):
    """PPO-Lagrangian with a critic for the reward and one for the cost."""

    uses_costs: ClassVar[bool] = True
    critics: ClassVar[tuple[CriticName, ...]] = ("critic", "cost_critic")
    whiten: bool = False
    threshold: float = Field(0.0, description="mean cost of a sample that is allowed")
    multiplier: float = Field(1.0, gt=0, description="λ at the start: what a unit of cost weighs against one of reward")
    multiplier_lr: float = Field(0.1, ge=0, description="step size of log λ")
    multiplier_max: float | None = Field(None, gt=0, description="bound of λ")
    cost_window: int = Field(1, ge=0, description="λ follows the costs of samples at most so many versions old")

    def initial_state(self) -> dict[str, float]:
        """With λ."""
        return super().initial_state() | {"multiplier": self.multiplier}

    def before_step(self, state: State, samples: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Log λ += η · λ · (mean cost − threshold), by the raw costs of fresh samples."""
        fresh = samples["costs"][samples["lags"] <= self.cost_window]
        if not len(fresh):
            return dict(state)
        multiplier = state["multiplier"]
        moved = math.log(multiplier) + self.multiplier_lr * multiplier * (float(fresh.mean()) - self.threshold)
        most = min(math.log(self.multiplier_max or math.inf), MAX_LOG_MULTIPLIER)
        return {**state, "multiplier": math.exp(max(min(moved, most), -MAX_LOG_MULTIPLIER))}

    def advantages(self, group: ScoredGroup) -> dict[str, np.ndarray]:
        """(A of the reward − λ · A of the cost) / (1 + λ); the KL's weight does not depend on λ."""
        reward, returns = self.gae(group.token_rewards, group.values, group)
        cost, cost_returns = self.gae(group.token_costs, group.cost_values, group)
        weight = group.state["multiplier"]
        combined = (reward - weight * cost) / (1 + weight)
        return {"advantages": combined, "returns": returns, "cost_returns": cost_returns}

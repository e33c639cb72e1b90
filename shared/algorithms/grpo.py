"""GRPO: rewards compared within the group, and PPO's clipped loss. arXiv 2402.03300."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from shared.algorithms import advantages
from shared.algorithms.base import Algorithm, LossInput
from shared.algorithms.losses import ppo_loss

if TYPE_CHECKING:
    import torch


class GRPO(Algorithm):
    """Group-relative policy optimisation."""

    clip_low: float = Field(0.2, gt=0, description="the ratio is clipped below 1 − clip_low")
    clip_high: float = Field(0.2, gt=0, description="the ratio is clipped above 1 + clip_high")
    dual_clip: float | None = Field(3.0, gt=1, description="bound of the loss where the advantage is negative")

    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """(R − mean) / std of the group."""
        return advantages.grpo(rewards)

    def loss(self, batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """PPO's loss with the group's advantage at each token."""
        loss, clipped = ppo_loss(
            batch.logprobs,
            batch.old_logprobs,
            batch.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
        )
        return loss, {"clip_fraction": clipped}

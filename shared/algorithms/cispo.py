"""CISPO: the importance ratio is clipped as a weight, so that every token keeps its gradient. arXiv 2506.13585."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from shared.algorithms import advantages
from shared.algorithms.base import Algorithm, LossInput, ScoredGroup
from shared.algorithms.losses import cispo_loss

if TYPE_CHECKING:
    import torch


class CISPO(Algorithm):
    """Clipped importance-sampling policy optimisation."""

    clip_low: float = Field(1.0, gt=0, description="the weight is at least 1 − clip_low; 1: no bound")
    clip_high: float = Field(4.0, gt=0, description="the weight is at most 1 + clip_high")

    def advantages(self, group: ScoredGroup) -> np.ndarray:
        """(R − mean) / std of the group."""
        return advantages.grpo(group.scores)

    def loss(self, batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The log-prob, weighted by advantage and clipped ratio."""
        loss, clipped = cispo_loss(
            batch.ratio, batch.logprobs, batch.advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )
        return loss, {"clip_fraction": clipped}

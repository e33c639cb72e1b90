"""GSPO: GRPO with the importance ratio of whole samples. arXiv 2507.18071."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from shared.algorithms.base import LossInput
from shared.algorithms.grpo import GRPO
from shared.algorithms.losses import Aggregation, clipped_loss, sequence_ratio

if TYPE_CHECKING:
    import torch


class GSPO(GRPO):
    """Group sequence policy optimisation."""

    aggregation: Aggregation = "seq_mean_token_mean"
    clip_low: float = Field(3e-4, gt=0, description="the ratio is clipped below 1 − clip_low")
    clip_high: float = Field(4e-4, gt=0, description="the ratio is clipped above 1 + clip_high")
    dual_clip: float | None = Field(None, gt=1, description="bound of the loss where the advantage is negative")

    def loss(self, batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The clipped surrogate of the sample's ratio at each of its tokens."""
        ratio = sequence_ratio(batch.logprobs, batch.old_logprobs, batch.sample, batch.n_samples)
        loss, clipped = clipped_loss(ratio, batch.advantages, **self.clip)
        return loss, {"clip_fraction": clipped}

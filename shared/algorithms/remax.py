"""ReMax: REINFORCE with the reward of the greedy answer as baseline. arXiv 2310.10505."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from shared.algorithms import advantages
from shared.algorithms.base import Algorithm, LossInput, ScoredGroup
from shared.algorithms.losses import Correction

if TYPE_CHECKING:
    import torch


class ReMax(Algorithm):
    """REINFORCE with the greedy answer as baseline: no critic, no comparison of samples."""

    group_baseline: ClassVar[bool] = False
    greedy_baseline: ClassVar[bool] = True
    kl_in: Literal["none", "reward", "loss"] = "reward"
    correction: Correction = "tis"  # the loss has no ratio of its own; at no lag it changes nothing
    kl_cumulative: bool = Field(
        False, description="a token pays for the KL of all later ones too, not for its own alone"
    )
    clip_difference: float | None = Field(
        5.0, gt=0, description="bound of the difference to the greedy answer's reward"
    )

    def advantages(self, group: ScoredGroup) -> np.ndarray:
        """R − R(greedy) at every token, less its KL."""
        bound = self.clip_difference or np.inf
        difference = np.clip(group.rewards - group.greedy_reward, -bound, bound)
        kl = advantages.reward_to_go(group.kl, group.mask, group.lengths) if self.kl_cumulative else group.kl
        return np.asarray(np.repeat(difference, group.lengths) - kl)

    def loss(self, batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """REINFORCE: −A · n."""
        return -batch.advantages * batch.logprobs, {}

"""OPO: the baseline of a sample is the mean reward of its group, weighted by length. arXiv 2505.23585."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from shared.algorithms import Algorithm
from shared.algorithms.losses import clipped_loss


class OPO(Algorithm):
    """Its fields are its settings: `algorithm: {name: examples/own_algorithm/opo.py:OPO, clip: 0.1}`."""

    clip: float = Field(0.2, gt=0, description="the ratio is kept within 1 ± clip")

    def advantages(self, group):
        """[n] one a sample, or [T] one a token; the samples without a valid reward are left out already."""
        if len(np.unique(group.scores)) < 2:
            return np.zeros(len(group.scores))
        return group.scores - np.average(group.scores, weights=group.lengths)

    def loss(self, batch):
        """[T] one a token that counts, and whatever should be among the metrics, [T] too."""
        loss, clipped = clipped_loss(batch.ratio, batch.advantages, clip_low=self.clip, clip_high=self.clip)
        return loss, {"clip_fraction": clipped}

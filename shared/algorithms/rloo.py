"""RLOO: each sample against the mean of the others. arXiv 2402.14740."""

from __future__ import annotations

import numpy as np

from shared.algorithms import advantages
from shared.algorithms.base import Clipped, ScoredGroup


class RLOO(Clipped):
    """REINFORCE leave-one-out, with PPO's clip against stale data."""

    def advantages(self, group: ScoredGroup) -> np.ndarray:
        """R − mean of the other samples."""
        return advantages.rloo(group.scores)

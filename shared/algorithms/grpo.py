"""GRPO: rewards compared within the group, and PPO's clipped loss. arXiv 2402.03300."""

from __future__ import annotations

import numpy as np

from shared.algorithms import advantages
from shared.algorithms.base import Clipped, ScoredGroup


class GRPO(Clipped):
    """Group-relative policy optimisation."""

    def advantages(self, group: ScoredGroup) -> np.ndarray:
        """(R − mean) / std of the group."""
        return advantages.grpo(group.scores)

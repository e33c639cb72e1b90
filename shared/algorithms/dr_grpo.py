"""Dr. GRPO: GRPO without its biases towards length and difficulty. arXiv 2503.20783."""

from __future__ import annotations

import numpy as np

from shared.algorithms import advantages
from shared.algorithms.base import Clipped, ScoredGroup
from shared.algorithms.losses import Aggregation


class DrGRPO(Clipped):
    """Group-relative policy optimisation, done right."""

    aggregation: Aggregation = "seq_mean_token_sum_norm"

    def advantages(self, group: ScoredGroup) -> np.ndarray:
        """R − mean of the group."""
        return advantages.dr_grpo(group.scores)

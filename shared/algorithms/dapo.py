"""DAPO: GRPO with a higher upper clip, replaced equal groups and a soft overlong penalty. arXiv 2503.14476."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from shared.algorithms import advantages
from shared.algorithms.base import ScoredGroup
from shared.algorithms.grpo import GRPO


class DAPO(GRPO):
    """Decoupled clip and dynamic sampling policy optimisation."""

    replace_equal: ClassVar[float] = 4.0
    clip_high: float = Field(0.28, gt=0, description="the ratio is clipped above 1 + clip_high")
    overlong_buffer: int | None = Field(
        None, ge=0, description="last tokens over which the penalty grows; default: a fifth of max_tokens; 0: none"
    )
    overlong_factor: float = Field(1.0, ge=0, description="penalty of a sample of max_tokens")

    def advantages(self, group: ScoredGroup) -> np.ndarray:
        """(R − mean) / std of the group, R with the overlong penalty."""
        buffer = group.max_tokens // 5 if self.overlong_buffer is None else self.overlong_buffer
        penalty = advantages.overlong(group.lengths, group.max_tokens, buffer) if buffer else 0.0
        return advantages.grpo(group.scores + self.overlong_factor * penalty)

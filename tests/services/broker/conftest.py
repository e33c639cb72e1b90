"""Columns that the stages of a test run complete their groups with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shared.graph import Stage, learner_stage, rollout_stage, scoring_stage
from shared.group import Columns, ragged, ragged_text

_MIDDLE = [rollout_stage(greedy=False), scoring_stage("reward", ["exact"])]
STAGES = [*_MIDDLE, learner_stage(_MIDDLE)]


def make_columns(stage: str, version: int = 0, samples: int = 2) -> Columns:
    """What a stage provides: two tokens a sample, all of one policy version."""
    if stage == "rollout":
        runs = [np.array([[version, 2]], dtype="i4") for _ in range(samples)]
        columns = ragged("tokens", [[1, 2]] * samples, "i4") | ragged_text("text", ["42"] * samples)
        return columns | {
            "prompt_tokens": np.array([1, 2, 3], dtype="i4"),
            "loss_mask": np.ones(2 * samples, dtype=bool),
            "behavior_logprobs": np.zeros(2 * samples, dtype="f4"),
            "versions": np.concatenate(runs),
            "versions_offsets": np.arange(samples + 1, dtype="i8"),
            "finish_reasons": np.zeros(samples, dtype="u1"),
        }
    if stage == "reference":
        return {"ref_logprobs": np.zeros(2 * samples, dtype="f4")}
    signal = {"reward": "exact", "cost": "harm"}[stage]
    return {
        f"{stage}s": np.ones(samples, dtype="f4"),
        f"{stage}_status": np.zeros(samples, dtype="u1"),
        **ragged_text(f"{stage}_reasons", [""] * samples),
        f"signal/{signal}": np.ones(samples, dtype="f4"),
        f"signal_status/{signal}": np.zeros(samples, dtype="u1"),
    }


@pytest.fixture
def columns_of() -> Callable[..., Columns]:
    """Makes the columns of a stage: `columns_of(stage, version, samples)`."""
    return make_columns


@pytest.fixture
def stages() -> list[Stage]:
    """Rollout, reward and learner."""
    return STAGES

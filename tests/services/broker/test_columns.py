"""What is refused before it enters the ledger."""

from __future__ import annotations

import numpy as np
import pytest

from services.broker.columns import check_columns
from shared.errors import ProtocolError
from shared.group import Prompt, TrajectoryGroup, ragged


def group(columns=None, min_version=0):
    return TrajectoryGroup("g0", "train", Prompt(0, 0, "p"), min_version, columns or {})


def test_what_the_stages_make_is_accepted(columns_of):
    rollout = columns_of("rollout", 3)
    check_columns(group(min_version=3), rollout)
    check_columns(group(rollout), columns_of("reward"))
    check_columns(group(rollout | columns_of("reward")), columns_of("cost"))


def test_samples_without_tokens_are_accepted(columns_of):
    columns = columns_of("rollout") | ragged("tokens", [[], []], "i4")
    columns |= {name: columns[name][:0] for name in ("loss_mask", "behavior_logprobs", "versions")}
    check_columns(group(), columns | {"versions_offsets": np.zeros(3, dtype="i8")})


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("tokens", np.array([1, 2, 3, 4], dtype="i8")),
        ("tokens", np.array([[1, 2, 3, 4]], dtype="i4")),
        ("tokens", np.array(1, dtype="i4")),
        ("tokens", np.array([1, 2, 3], dtype="i4")),
        ("tokens_offsets", np.array([0, 4], dtype="i8")),
        ("tokens_offsets", np.array([0, 5, 4], dtype="i8")),
        ("tokens_offsets", np.array([1, 2, 4], dtype="i8")),
        ("tokens_offsets", np.array([], dtype="i8")),
        ("text_offsets", np.array([0, 2, 5], dtype="i8")),
        ("loss_mask", np.ones(3, dtype=bool)),
        ("behavior_logprobs", np.zeros(5, dtype="f4")),
        ("finish_reasons", np.zeros(3, dtype="u1")),
        ("finish_reasons", np.full(2, 3, dtype="u1")),
        ("versions", np.array([[3, 2], [3, 1]], dtype="i4")),
        ("versions", np.array([[3, 2], [2, 2]], dtype="i4")),
        ("versions", np.array([[3, 4], [3, 0]], dtype="i4")),
        ("versions", np.array([[3, 2, 0], [3, 2, 0]], dtype="i4")),
        ("versions", np.array([3, 2], dtype="i4")),
    ],
)
def test_a_rollout_column_that_does_not_fit_is_refused(columns_of, name, array):
    with pytest.raises(ProtocolError) as refusal:
        check_columns(group(min_version=3), columns_of("rollout", 3) | {name: array})
    assert refusal.value.code == "bad_column"


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("rewards", np.ones(2, dtype="f8")),
        ("rewards", np.ones(3, dtype="f4")),
        ("reward_status", np.full(2, 9, dtype="u1")),
        ("signal/exact", np.ones(1, dtype="f4")),
        ("signal_status/exact", np.array([0, 7], dtype="u1")),
    ],
)
def test_a_reward_column_that_does_not_fit_is_refused(columns_of, name, array):
    with pytest.raises(ProtocolError) as refusal:
        check_columns(group(columns_of("rollout")), columns_of("reward") | {name: array})
    assert refusal.value.code == "bad_column"


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("costs", np.ones(2, dtype="f8")),
        ("costs", np.ones(3, dtype="f4")),
        ("cost_status", np.full(2, 9, dtype="u1")),
        ("cost_status", np.zeros(1, dtype="u1")),
        ("cost_reasons_offsets", np.array([0, 0], dtype="i8")),
    ],
)
def test_a_cost_column_that_does_not_fit_is_refused(columns_of, name, array):
    with pytest.raises(ProtocolError) as refusal:
        check_columns(group(columns_of("rollout")), columns_of("cost") | {name: array})
    assert refusal.value.code == "bad_column"

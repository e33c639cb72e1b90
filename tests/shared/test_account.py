"""Time accounts balance."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.account import BUCKETS, Bucket, TimeAccount


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.sampled_from(get_args(Bucket)), st.floats(0, 1e4)), max_size=30))
def test_the_buckets_and_the_spans_add_up_to_the_wall_time(visits: list[tuple[Bucket, float]]) -> None:
    clock = Clock()
    account = TimeAccount(clock)
    for bucket, stay_s in visits:
        account.enter(bucket)
        clock.now += stay_s
    wall_s = clock.now - account.started
    assert set(account.seconds()) == set(BUCKETS)
    assert sum(account.seconds().values()) == pytest.approx(wall_s)
    last = visits[-1][0] if visits else "overhead"
    account.enter("compute" if last != "compute" else "room")  # closes what was open
    assert sum(end - start for start, end, _ in account.take_spans()) == pytest.approx(wall_s)


def test_time_goes_to_the_open_bucket_and_back_after_a_block() -> None:
    clock = Clock()
    account = TimeAccount(clock)
    account.enter("groups")
    clock.now += 1
    with account.within("weights"):
        clock.now += 2
    clock.now += 4
    assert account.seconds()["weights"] == 2
    assert account.seconds()["groups"] == 5


def test_a_block_that_fails_gives_the_bucket_back() -> None:
    clock = Clock()
    account = TimeAccount(clock)
    with pytest.raises(ValueError), account.within("compute"):
        raise ValueError
    clock.now += 3
    assert account.seconds()["overhead"] == 3


def test_spans_are_handed_out_once_and_entering_the_open_bucket_makes_none() -> None:
    clock = Clock()
    account = TimeAccount(clock)
    account.enter("compute")
    clock.now += 1
    account.enter("compute")
    clock.now += 1
    account.enter("prompts")
    assert account.take_spans() == [(100.0, 102.0, "compute")]
    assert account.take_spans() == []

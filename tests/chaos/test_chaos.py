"""A short round of tests/chaos/chaos.py, and two epochs with kills in which every row is trained exactly twice."""

from __future__ import annotations

from collections import Counter

import pytest

from stretto import launcher
from tests.chaos import chaos


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(launcher, "FIRST_PAUSE_S", 0.1)


async def test_whatever_is_killed_or_stopped_no_group_is_lost_or_trained_twice(tmp_path, tiny_model):
    config = chaos.config_of(tmp_path, tiny_model, rows=100, steps=10_000_000)
    done = await chaos.run_with_faults(
        tmp_path, config, faults=10, number=3, stop_s=2.0, drain=True, show=lambda text: print(text)
    )
    status = chaos.check_accounts(tmp_path / "run")
    assert status["state"] == "stopped" and status["version"] > 10 and done.seconds


async def test_two_epochs_with_kills_train_every_row_exactly_twice(tmp_path, tiny_model):
    config = chaos.config_of(tmp_path, tiny_model, rows=60, epochs=2)
    await chaos.run_with_faults(
        tmp_path, config, faults=5, number=11, stop_s=1.0, drain=False, show=lambda text: print(text)
    )
    status = chaos.check_accounts(tmp_path / "run")
    assert status["state"] == "finished" and status["version"] == 60
    rows = Counter(row for batch in chaos.consumed_by_version(tmp_path / "run").values() for _, row in batch)
    assert rows == dict.fromkeys(range(60), 2)

"""Rates of a run."""

from __future__ import annotations

import pytest

from services.broker.pace import WINDOW, Pace


def test_nothing_is_known_before_the_second_version():
    pace = Pace()
    pace.committed(10.0, 8)
    assert set(pace.figures(5).values()) == {None}


def test_rates_are_taken_between_the_first_and_the_last_version():
    pace = Pace()
    pace.generated(500)
    pace.committed(10.0, 8)
    pace.generated(100)
    pace.committed(12.0, 8)
    pace.generated(300)
    pace.committed(14.0, 8)
    assert pace.figures(5) == {"sequences_per_s": 4.0, "tokens_per_s": 100.0, "eta_s": 10.0}


def test_old_versions_are_forgotten():
    pace = Pace()
    for version in range(100):
        pace.committed(1.0 * version**2, 8)
    last, first = 99**2, (99 - WINDOW) ** 2
    assert pace.figures(0)["sequences_per_s"] == pytest.approx(8 * WINDOW / (last - first))

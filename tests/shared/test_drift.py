"""Log-prob drift: when a run warns, when it ends, and what it says."""

from __future__ import annotations

import pytest

from shared.drift import WARN_EVERY, DriftWarnings, check_drift
from shared.errors import ConfigError, DriftError


def metrics(mean: float, *, lag: int = 0) -> dict[str, float]:
    figures = {"mean": mean, "max": 1.9, "k3": 0.07, "tokens": 312, "lag": lag}
    return {f"drift/fresh/{name}": float(value) for name, value in figures.items()}


def test_a_warning_has_figures_limit_and_where_to_look():
    warning = DriftWarnings(0.1).of(metrics(0.31), 7)
    assert warning.startswith(
        "the log-probs of 312 tokens that the engine sampled with version 7 differ from those of the learner at "
        "version 7 by 0.31 nats on average (learner.drift_warn: 0.1), at most by 1.9, k3 0.07; look at learner.dtype"
    )


def test_where_the_policy_has_moved_since_the_samples_a_warning_says_so():
    warning = DriftWarnings(0.1).of(metrics(0.31, lag=2), 7)
    assert "sampled with version 5 differ from those of the learner at version 7" in warning
    assert "look at how far an update moves the policy (learner.lr, kl), learner.dtype" in warning


def test_a_warning_comes_once_in_so_many_versions():
    warnings = DriftWarnings(0.1)
    warned = [version for version in range(50) if warnings.of(metrics(0.31 if version >= 3 else 0.05), version)]
    assert warned == [3, 3 + WARN_EVERY, 3 + 2 * WARN_EVERY]


@pytest.mark.parametrize("limit", [None, 0.31])
def test_there_is_no_warning_and_no_end_without_a_limit_or_up_to_it(limit):
    assert DriftWarnings(limit).of(metrics(0.31), 7) is None
    check_drift(metrics(0.31), 7, limit)


def test_a_step_without_samples_to_compare_neither_warns_nor_ends():
    assert DriftWarnings(0.1).of({}, 7) is None
    check_drift({}, 7, 0.1)


def test_beyond_its_limit_the_drift_of_the_own_version_ends_the_run_and_no_restart_mends_it():
    with pytest.raises(DriftError, match=r"by 0\.31 nats .*\(learner\.drift_stop: 0\.3\), at most by 1\.9, k3 0\.07"):
        check_drift(metrics(0.31), 7, 0.3)
    assert issubclass(DriftError, ConfigError)


def test_the_drift_of_older_samples_never_ends_a_run():
    check_drift(metrics(9.0, lag=1), 7, 0.3)

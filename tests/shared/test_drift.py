"""Log-prob drift: when a run warns, when it ends, and what it says."""

from __future__ import annotations

import pytest

from shared.config import parse_config
from shared.drift import WARN_EVERY, DriftWarnings, check_drift
from shared.errors import ConfigError, DriftError


def warnings(*, learner: str = "bfloat16", rollout: str = "bfloat16", limit: float | None = None) -> DriftWarnings:
    tree = {
        "model": "none",
        "steps": 1,
        "prompts_per_step": 1,
        "samples_per_prompt": 2,
        "data": {"train": "none"},
        "reward": {"signals": [{"name": "s", "function": "exact_match"}]},
        "learner": {"dtype": learner, "drift_warn": limit},
        "rollout": {"dtype": rollout},
    }
    return DriftWarnings(parse_config(tree))


def metrics(mean: float, *, lag: int = 0) -> dict[str, float]:
    figures = {"mean": mean, "max": 1.9, "k3": 0.07, "tokens": 312, "lag": lag}
    return {f"drift/fresh/{name}": float(value) for name, value in figures.items()}


def test_a_warning_has_figures_limit_and_where_to_look():
    assert (
        warnings(limit=0.3)
        .of(metrics(0.31), 7)
        .startswith(
            "the engine's log-probs of 312 tokens that it sampled with version 7 differ from the learner's at the same "
            "version by 0.31 nats on average, at most by 1.9, k3 0.07, above learner.drift_warn (0.3): look at "
        )
    )


def test_a_warning_comes_once_in_so_many_versions():
    own = warnings()
    warned = [version for version in range(50) if own.of(metrics(0.31 if version >= 3 else 0.05), version)]
    assert warned == [3, 3 + WARN_EVERY, 3 + 2 * WARN_EVERY]


@pytest.mark.parametrize(
    ("learner", "rollout", "limit"),
    [("float32", "float32", 1e-3), ("float32", "float16", 0.02), ("bfloat16", "float32", 0.1)],
)
def test_by_default_a_run_warns_where_the_self_check_would_fail(learner, rollout, limit):
    own = warnings(learner=learner, rollout=rollout)
    assert own.of(metrics(limit), 7) is None
    assert own.of(metrics(1.01 * limit), 7) is not None


def test_a_run_ends_beyond_its_limit_alone():
    check_drift(metrics(0.31), 7, None)
    check_drift(metrics(0.31), 7, 0.31)
    with pytest.raises(
        DriftError, match=r"version 7 differ .* by 0\.31 nats .* above learner\.drift_stop \(0\.3\); lik"
    ):
        check_drift(metrics(0.31), 7, 0.3)


def test_no_restart_mends_drift():
    assert issubclass(DriftError, ConfigError)


@pytest.mark.parametrize("figures", [{}, metrics(9.0, lag=1)], ids=["nothing", "older"])
def test_a_step_without_samples_of_the_own_version_neither_warns_nor_ends(figures):
    assert warnings().of(figures, 7) is None
    check_drift(figures, 7, 0.1)

"""Log-prob drift between engine and learner: when a run warns of it and when it ends. The broker and the learner ask.

It is judged by the `drift/fresh/…` metrics of a step, and only where these are of samples of the learner's own version
(`drift/fresh/lag` 0): there the difference is numerics alone, and not how far the policy has moved since.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.config import RunConfig
from shared.errors import DriftError

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 2e-2}
"""Mean |learner − engine| log-prob of one version above which the two do not compute the same policy, by dtype."""

WARN_EVERY = 20
"""Versions between two warnings."""

CAUSES = (
    "learner.dtype and rollout.dtype (do both sides agree in float32?), a quantised K/V cache, and the temperature and "
    "filters that the engine really samples with"
)
"""Why engine and learner may differ at one version, after the self-check at version 0 found them alike."""


def tolerance(config: RunConfig) -> float:
    """Of the coarser of the two dtypes."""
    return max(TOLERANCE[config.learner.dtype], TOLERANCE[config.rollout.dtype])


def warn_limit(config: RunConfig) -> float:
    """Mean drift, in nats, above which a run warns."""
    return config.learner.drift_warn or tolerance(config)


class DriftWarnings:
    """Warns of drift above `learner.drift_warn`, at most once in WARN_EVERY versions."""

    def __init__(self, config: RunConfig) -> None:
        self._limit = warn_limit(config)
        self._last: int | None = None

    def of(self, metrics: Mapping[str, float], version: int) -> str | None:
        """What to tell the user of the metrics of an update of the policy `version`; None: nothing, or not again."""
        if not _exceeds(metrics, self._limit) or (self._last is not None and version - self._last < WARN_EVERY):
            return None
        self._last = version
        return f"{_figures(metrics, version)}, above learner.drift_warn ({self._limit:g}): look at {CAUSES}"


def check_drift(metrics: Mapping[str, float], version: int, limit: float | None) -> None:
    """Raises DriftError where an update of the policy `version` has samples of that version that drift.

    limit: nats that the engine's log-probs of them may be from the learner's, on average; None: any.
    """
    if limit is not None and _exceeds(metrics, limit):
        raise DriftError(
            f"engine and learner do not compute the same policy any more: {_figures(metrics, version)}, above "
            f"learner.drift_stop ({limit:g}); likely causes are {CAUSES}; mend it and go on by --resume, or raise "
            "learner.drift_stop"
        )


def _exceeds(metrics: Mapping[str, float], limit: float) -> bool:
    return metrics.get("drift/fresh/lag") == 0 and metrics.get("drift/fresh/mean", 0.0) > limit


def _figures(metrics: Mapping[str, float], version: int) -> str:
    tokens, mean, largest, k3 = (
        metrics.get(f"drift/fresh/{name}", float("nan")) for name in ("tokens", "mean", "max", "k3")
    )
    return (
        f"the engine's log-probs of {tokens:.0f} tokens that it sampled with version {version} differ from the "
        f"learner's at the same version by {mean:.3g} nats on average, at most by {largest:.3g}, k3 {k3:.3g}"
    )

"""Log-prob drift between engine and learner: when a run warns of it and when it ends. The broker and the learner ask.

It is judged by the `drift/fresh/…` metrics of a step: those of the freshest samples, which are `drift/fresh/lag`
versions older than the learner. Only at lag 0 is the difference numerics alone; otherwise the policy has moved too.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import DriftError

WARN_EVERY = 20
"""Versions between two warnings."""

CAUSES = (
    "learner.dtype and rollout.dtype (do both sides agree in float32?), a quantised K/V cache, and the temperature and "
    "filters that the engine really samples with"
)
"""Why engine and learner may differ at one version, after the self-check at version 0 found them alike."""


class DriftWarnings:
    """Warns of drift above a limit (nats; None: never), at most once in WARN_EVERY versions."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._last: int | None = None

    def of(self, metrics: Mapping[str, float], version: int) -> str | None:
        """What to tell the user of the metrics of an update of the policy `version`; None: nothing, or not again."""
        if not _exceeds(metrics, self._limit) or (self._last is not None and version - self._last < WARN_EVERY):
            return None
        self._last = version
        moved = "how far an update moves the policy (learner.lr, kl), " if metrics.get("drift/fresh/lag") else ""
        return f"{_figures(metrics, version, f'drift_warn: {self._limit:g}')}; look at {moved}{CAUSES}"


def check_drift(metrics: Mapping[str, float], version: int, limit: float | None) -> None:
    """Raises DriftError where an update of the policy `version` has samples of that very version, and they drift.

    limit: nats that the engine's log-probs of them may be from the learner's, on average; None: any.
    """
    if _exceeds(metrics, limit) and metrics.get("drift/fresh/lag") == 0:
        raise DriftError(
            f"engine and learner do not compute the same policy any more: "
            f"{_figures(metrics, version, f'drift_stop: {limit:g}')}; likely causes are {CAUSES}; "
            "mend it and go on by --resume, or raise learner.drift_stop"
        )


def _exceeds(metrics: Mapping[str, float], limit: float | None) -> bool:
    return limit is not None and metrics.get("drift/fresh/mean", 0.0) > limit


def _figures(metrics: Mapping[str, float], version: int, limit: str) -> str:
    mean, largest, k3, tokens, lag = (
        metrics.get(f"drift/fresh/{name}", float("nan")) for name in ("mean", "max", "k3", "tokens", "lag")
    )
    return (
        f"the log-probs of {tokens:.0f} tokens that the engine sampled with version {version - lag:.0f} differ from "
        f"those of the learner at version {version} by {mean:.3g} nats on average (learner.{limit}), at most by "
        f"{largest:.3g}, k3 {k3:.3g}"
    )

"""vLLM's own figures about its scheduler, kept for VllmEngine.stats."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


class SchedulerFigures(StatLoggerBase):  # type: ignore[misc]
    """A stat logger that keeps the last figures of each engine core (there are several with data parallelism)."""

    def __init__(self) -> None:
        self._last: dict[int, Any] = {}

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> SchedulerFigures:
        """Itself: vLLM takes a factory and calls it once for each engine core."""
        return self

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM after each step."""
        if scheduler_stats is not None:
            self._last[engine_idx] = scheduler_stats

    def log_engine_initialized(self) -> None:
        """Nothing to tell."""

    def figures(self) -> dict[str, float]:
        """Samples in flight and waiting; the fullest engine core's share of its K/V memory in use."""
        last = list(self._last.values())
        return {
            "samples_in_flight": float(sum(stats.num_running_reqs for stats in last)),
            "samples_waiting": float(sum(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs for stats in last)),
            "cache_use": max((float(stats.kv_cache_usage) for stats in last), default=0.0),
        }

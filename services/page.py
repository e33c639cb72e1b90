"""What one scrape of a service shows: metrics under Prometheus' names, in base units. docs/metrics.md lists them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

UNITS = {"_s": ("_seconds", 1), "_mib": ("_bytes", 2**20)}
"""Ends of figures' names, what Prometheus has in their place, and the factor from one unit to the other."""
COUNTERS = {
    *("samples", "tokens", "prompt_tokens", "steps", "swaps", "busy_s", "weights/rounds", "weights/broken_rounds"),
    *("weights/streamed_mib", "weights/saved_mib", "weights/evictions"),
}
"""Figures that only grow while a service lives."""


class Page:
    """The metrics of one scrape. labels: of all of them. families: by name."""

    def __init__(self, **labels: str) -> None:
        self.families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        self._labels = labels

    def add(self, name: str, meaning: str, value: float | None, **labels: str) -> None:
        """Add a sample of `stretto_<name>`, unless it has no value. What only grows has a name in `_total`."""
        if value is None:
            return
        labels = self._labels | labels
        if name not in self.families:
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            self.families[name] = kind(f"stretto_{name}", meaning, labels=list(labels))
        self.families[name].add_metric(list(labels.values()), value)

    def add_state(self, state: str, states: Iterable[str]) -> None:
        """Add `stretto_state`: 1 for the state, 0 for the others."""
        for one in states:
            self.add("state", "1 for the state that the service is in", float(one == state), state=one.lower())

    def add_figures(self, figures: Mapping[str, float | None], prefix: str = "") -> None:
        """Add figures under the names that follow from their own."""
        for figure, value in figures.items():
            name, factor = metric_name(figure)
            if value is not None:
                self.add(f"{prefix}{name}", f"the figure {figure}", value * factor)


def metric_name(figure: str) -> tuple[str, float]:
    """A figure's name as Prometheus has it, and the factor to its unit: `weights/pause_s` is in seconds there."""
    end = next((end for end in UNITS if figure.endswith(end)), "")
    unit, factor = UNITS.get(end, ("", 1))
    name = re.sub(r"\W+", "_", figure.removesuffix(end)) + unit
    return f"{name}_total" if figure in COUNTERS else name, factor

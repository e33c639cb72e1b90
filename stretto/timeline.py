"""Spans of time of the services of a run: how much of one overlaps another, and a picture of them."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Span = tuple[float, float]

COLOURS = {"rollout": "#2a9d8f", "reward": "#e9c46a", "learner": "#e76f51"}
LABELS = {"rollout": "generation", "reward": "reward", "learner": "update"}


def read_spans(run_folder: Path, bucket: str = "compute") -> dict[str, list[Span]]:
    """The spans of one bucket by instance, unix seconds, in order."""
    spans: dict[str, list[Span]] = defaultdict(list)
    with (run_folder / "spans.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["bucket"] == bucket:
                spans[record["instance"]].append((record["start"], record["end"]))
    return {instance: union(found) for instance, found in sorted(spans.items())}


def union(spans: list[Span]) -> list[Span]:
    """The same time as spans that do not overlap, in order."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def overlap_s(left: list[Span], right: list[Span]) -> float:
    """Seconds that are in both; each list is without overlap and in order."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap_ratio(spans: dict[str, list[Span]]) -> float | None:
    """Share of the learner's computing time during which at least one rollout generates; None without a learner.

    The time before the first rollout generates (loading, first weights) is left out.
    """
    learner = spans.get("learner", [])
    rollouts = union([span for name, found in spans.items() if name.startswith("rollout") for span in found])
    if not rollouts:
        return None
    learner = [(max(start, rollouts[0][0]), end) for start, end in learner if end > rollouts[0][0]]
    busy = sum(end - start for start, end in learner)
    return overlap_s(learner, rollouts) / busy if busy else None


def draw_timeline(spans: dict[str, list[Span]], path: Path, *, window_s: float = 40.0) -> None:
    """A picture: a readable window from the middle of the run, and the whole run below it."""
    from matplotlib.figure import Figure

    rows = [name for name in spans if name.rpartition("-")[0] in COLOURS or name in COLOURS]
    begin = min(spans[name][0][0] for name in rows)
    end = max(spans[name][-1][1] for name in rows)
    middle = (begin + end) / 2
    window = (max(begin, middle - window_s / 2), min(end, middle + window_s / 2))
    figure = Figure(figsize=(12, 1.6 + 0.9 * len(rows)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(2, 1))
    for axes, (left, right) in ((above, window), (below, (begin, end))):
        _draw_rows(axes, rows, spans, left, right, begin)
    above.set_title(f"{window[1] - window[0]:.0f} s from the middle of the run", loc="left", fontsize=10)
    below.set_title("the whole run", loc="left", fontsize=10)
    below.set_xlabel("seconds since the first work")
    figure.savefig(path, dpi=120)


def _draw_rows(
    axes: Any, rows: list[str], spans: dict[str, list[Span]], left: float, right: float, zero: float
) -> None:
    for y, name in enumerate(reversed(rows)):
        service = name.rpartition("-")[0] or name
        bars = [(max(a, left) - zero, min(b, right) - max(a, left)) for a, b in spans[name] if b > left and a < right]
        axes.broken_barh(bars, (y - 0.4, 0.8), facecolors=COLOURS[service], linewidth=0)
    axes.set_yticks(range(len(rows)), [f"{n} ({LABELS[n.rpartition('-')[0] or n]})" for n in reversed(rows)])
    axes.set_xlim(left - zero, right - zero)
    axes.spines[["top", "right"]].set_visible(False)

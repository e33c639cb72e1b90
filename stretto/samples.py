"""`stretto samples`: reads the groups that a run wrote down, and shows them to a person."""

from __future__ import annotations

import heapq
import json
from collections import deque
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.errors import DataError

Order = Literal["latest", "best", "worst"]


def find_groups(
    run_folder: Path,
    *,
    lane: str = "train",
    version: int | None = None,
    group: str | None = None,
    count: int = 5,
    order: Order = "latest",
) -> list[dict[str, Any]]:
    """Up to `count` groups of a run that fit: the latest, or those of the highest or lowest mean reward first.

    A `group` is found in any lane and version. Raises DataError where the folder has none, or none fits.
    """
    file = run_folder / "samples.jsonl"
    if not file.is_file():
        raise DataError(f"{run_folder} is not the folder of a run: it has no samples.jsonl")

    def fits(record: dict[str, Any]) -> bool:
        if group is not None:
            return bool(record["group"] == group)
        return record["lane"] == lane and version in (None, record["version"])

    with file.open(encoding="utf-8") as lines:
        fitting = (record for record in map(json.loads, lines) if fits(record))
        match order:
            case "latest":
                found = list(deque(fitting, maxlen=count))
            case "best":
                found = heapq.nlargest(count, fitting, key=mean_reward)
            case "worst":
                found = heapq.nsmallest(count, fitting, key=mean_reward)
    if not found:
        raise DataError(f"no group in {file} fits")
    return found


def mean_reward(record: dict[str, Any]) -> float:
    """Mean over the samples of a group that have a reward; at least one has."""
    valid: list[float] = [
        r for r, status in zip(record["rewards"], record["reward_status"], strict=True) if status == "ok"
    ]
    return sum(valid) / len(valid)


def show_group(console: Console, record: dict[str, Any]) -> None:
    """Print a group: its prompt, and a line for each answer."""
    fields = ", ".join(f"{name}: {value}" for name, value in record["fields"].items())
    used = "replaced" if record["version"] is None else f"version {record['version']}"
    console.print(Text(f"{record['group']}  {used}  row {record['row']}  {fields}", style="cyan"))
    console.print(Text(record["prompt"]))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    has_costs = "costs" in record  # of runs that score them
    for title in ("reward", *(["cost"] if has_costs else []), *record["signals"], "versions", "end", "answer"):
        table.add_column(title)
    for i, text in enumerate(record["texts"]):
        totals = [_total(record["rewards"][i], record["reward_status"][i], record["reasons"][i])]
        if has_costs:
            totals.append(_total(record["costs"][i], record["cost_status"][i], record["cost_reasons"][i]))
        signals = ["-" if values[i] is None else f"{values[i]:.3g}" for values in record["signals"].values()]
        versions = ", ".join(f"{v}×{n}" for v, n in record["versions"][i])
        table.add_row(*totals, *signals, versions, record["finish"][i], Text(repr(text)[1:-1]))
    console.print(table)


def _total(value: float, status: str, reason: str) -> str:
    return f"{value:.3g}" if status == "ok" else f"{status}: {reason}"

"""`stretto samples`: reads the groups that a run wrote down, and shows them to a person."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shared.errors import DataError


def find_groups(
    run_folder: Path, *, lane: str = "train", version: int | None = None, group: str | None = None, last: int = 5
) -> list[dict[str, Any]]:
    """The latest groups of a run that fit. Raises DataError where the folder has none, or none fits."""
    file = run_folder / "samples.jsonl"
    if not file.is_file():
        raise DataError(f"{run_folder} is not the folder of a run: it has no samples.jsonl")
    found: deque[dict[str, Any]] = deque(maxlen=last)
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if group is not None:
                fits = record["group"] == group
            else:
                fits = record["lane"] == lane and version in (None, record["version"])
            if fits:
                found.append(record)
    if not found:
        raise DataError(f"no group in {file} fits")
    return list(found)


def show_group(console: Console, record: dict[str, Any]) -> None:
    """Print a group: its prompt, and a line for each answer."""
    fields = ", ".join(f"{name}: {value}" for name, value in record["fields"].items())
    console.print(Text(f"{record['group']}  version {record['version']}  row {record['row']}  {fields}", style="cyan"))
    console.print(Text(record["prompt"]))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for title in ("reward", *record["signals"], "versions", "end", "answer"):
        table.add_column(title)
    for i, text in enumerate(record["texts"]):
        status = record["reward_status"][i]
        reward = f"{record['rewards'][i]:.3g}" if status == "ok" else f"{status}: {record['reasons'][i]}"
        signals = ["-" if values[i] is None else f"{values[i]:.3g}" for values in record["signals"].values()]
        versions = ", ".join(f"{v}×{n}" for v, n in record["versions"][i])
        table.add_row(reward, *signals, versions, record["finish"][i], Text(repr(text)[1:-1]))
    console.print(table)

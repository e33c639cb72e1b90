"""Writes what happened to the run folder, one JSON object a line: what `stretto samples` and the report read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

from shared.group import FinishReason, RewardStatus, TrajectoryGroup

FILES = ("metrics", "samples", "spans", "evaluations", "dead_letters")


class RunLog:
    """The files of a run folder.

    metrics.jsonl has a line a version, samples.jsonl one a group that was consumed, replaced or evaluated, spans.jsonl
    one a span of a service's time; evaluations.jsonl, dead_letters.jsonl and status.json say it by their names.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, TextIO] = {
            name: (folder / f"{name}.jsonl").open("a", encoding="utf-8", buffering=1) for name in FILES
        }

    def write(self, file: str, record: dict[str, Any]) -> None:
        """Append a line to `<file>.jsonl`."""
        self._files[file].write(json.dumps(_finite(record)) + "\n")

    def group(self, group: TrajectoryGroup, version: int | None) -> None:
        """Append a group that was consumed by `version` or evaluated for it; None: another took its place."""
        columns = group.columns
        signals = {
            name.removeprefix("signal/"): v.tolist() for name, v in columns.items() if name.startswith("signal/")
        }
        record = {
            "group": group.group_id,
            "lane": group.lane,
            "version": version,
            "row": group.prompt.row,
            "epoch": group.prompt.epoch,
            "prompt": group.prompt.text,
            "fields": group.prompt.fields,
            "texts": group.texts(),
            "rewards": columns["rewards"].tolist(),
            "reward_status": [RewardStatus(s).name.lower() for s in columns["reward_status"]],
            "reasons": group.texts("reward_reasons"),
            "signals": signals,
            "finish": [FinishReason(f).name.lower() for f in columns["finish_reasons"]],
            "versions": [runs.tolist() for runs in group.samples("versions")],
        }
        self.write("samples", record)

    def status(self, status: dict[str, Any]) -> None:
        """Replace status.json."""
        aside = self._folder / ".status.json.partial"
        aside.write_text(json.dumps(_finite(status), indent=1))
        os.replace(aside, self._folder / "status.json")

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _finite(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value

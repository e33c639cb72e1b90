"""Writes what happened to the run folder, one JSON object a line: what `stretto samples` and the report read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

from shared.group import FinishReason, RewardStatus, TrajectoryGroup

MAX_LINE_BYTES = 1 << 26
FILES = ("metrics", "samples", "spans", "evaluations", "dead_letters")


class RunLog:
    """The files of a run folder.

    metrics.jsonl has a line a version, samples.jsonl one a group that was consumed, replaced or evaluated, spans.jsonl
    one a span of a service's time; evaluations.jsonl, dead_letters.jsonl and status.json say it by their names. What a
    run did again after it was rewound stands there twice, and the later line counts.

    failure: why nothing more can be written, once that is so.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, TextIO] = {name: _open(folder / f"{name}.jsonl") for name in FILES}
        self.failure: str | None = None

    def write(self, file: str, record: dict[str, Any]) -> None:
        """Append a line to `<file>.jsonl`."""
        if self.failure is None:
            try:
                self._files[file].write(_json(record) + "\n")
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.failure = f"the files of {self._folder} cannot be written ({error.strerror}): make room, then --resume"

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
            "greedy": [i for i, sampled in enumerate(group.is_sampled()) if not sampled],
            "versions": [runs.tolist() for runs in group.samples("versions")],
        }
        if "costs" in columns:
            record["costs"] = columns["costs"].tolist()
            record["cost_status"] = [RewardStatus(s).name.lower() for s in columns["cost_status"]]
            record["cost_reasons"] = group.texts("cost_reasons")
        self.write("samples", record)

    def status(self, status: dict[str, Any]) -> None:
        """Replace status.json."""
        aside = self._folder / ".status.json.partial"
        try:
            aside.write_text(_json(status, indent=1))
            os.replace(aside, self._folder / "status.json")
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            try:
                file.close()
            except OSError as error:  # what a full disk had no room for
                self._fail(error)


def latest_records(file: Path) -> list[dict[str, Any]]:
    """The records of a file by version; a version that was done again counts as it was done last."""
    with file.open(encoding="utf-8") as lines:
        records = {record["version"]: record for record in map(json.loads, lines)}
    return [records[version] for version in sorted(records)]


def _open(path: Path) -> TextIO:
    """A file to append lines to; a last line that was cut off in the middle is removed."""
    with path.open("ab+") as file:
        end = file.tell()
        file.seek(max(0, end - MAX_LINE_BYTES))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(end - len(tail) + tail.rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8", buffering=1)


def _json(value: Any, indent: int | None = None) -> str:
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except (TypeError, ValueError):
        return json.dumps(_finite(value), indent=indent)


def _finite(value: Any) -> Any:
    """JSON has no NaN (null takes its place), and no NumPy scalars."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""The run folder: which one a run gets, and what is read back from it. The command line and the report call it.

A run folder holds config.yaml, broker.json, logs/, checkpoints/, what services/broker/runlog.py writes, launch.json and
the report.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shared.config import RunConfig
from shared.errors import ConfigError, DataError

CONFIG_FILE = "config.yaml"
ADDRESS_FILE = "broker.json"
LAUNCH_FILE = "launch.json"


def new_run_folder(config: RunConfig, asked: Path | None) -> Path:
    """Where a new run goes: the folder that was asked for, or else <folder>/<name>, <name>-2, … whichever is free.

    Raises ConfigError where the folder that was asked for holds a run.
    """
    if asked is None:
        return next(path for path in _numbered(config) if not holds_run(path))
    if holds_run(asked):
        raise ConfigError(f"{asked} holds a run already: go on with it by --resume, or choose another --run-folder")
    return asked


def resumed_run_folder(config: RunConfig, asked: Path | None) -> Path:
    """The folder of the run to go on with: the one that was asked for, or else the newest of this name.

    Raises DataError where it holds no checkpoint, ConfigError where its run is still going on.
    """
    folder = asked or config.run_folder
    if asked is None:
        for path in _numbered(config):
            if not holds_run(path):
                break
            folder = path
    if not any((folder / "checkpoints").glob("checkpoint-*")):
        raise DataError(f"{folder} holds no checkpoint to resume from: start the run without --resume")
    if broker_address(folder) is not None:
        raise ConfigError(f"the run in {folder} is still going on: stop it first, or start another without --resume")
    return folder


def holds_run(folder: Path) -> bool:
    """Whether a run has begun in a folder."""
    return (folder / CONFIG_FILE).exists()


def write_address(folder: Path, address: str) -> None:
    """Tell others where the broker of the run, which is this process, listens."""
    aside = folder / f".{ADDRESS_FILE}.partial"
    aside.write_text(json.dumps({"address": address, "pid": os.getpid()}))
    os.replace(aside, folder / ADDRESS_FILE)


def broker_address(folder: Path) -> str | None:
    """The address of the run's broker; None where there is none, or its process has ended."""
    try:
        found = json.loads((folder / ADDRESS_FILE).read_text())
        os.kill(found["pid"], 0)
    except PermissionError:
        pass  # another user's process: it is there
    except (OSError, ValueError):
        return None
    return str(found["address"])


def read_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The records of `<name>.jsonl`; none where there is no such file. A line cut short by a crash is left out."""
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        return []
    records = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                records.append(json.loads(line))
    return records


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The map in a JSON file of the folder; empty where there is no such file."""
    try:
        found: dict[str, Any] = json.loads((folder / name).read_text())
    except FileNotFoundError:
        return {}
    return found


def require_run(folder: Path) -> None:
    """Raises DataError where a folder holds no run."""
    if not holds_run(folder):
        raise DataError(f"{folder} is no run folder: it has no {CONFIG_FILE}")


def _numbered(config: RunConfig) -> Any:
    first = config.run_folder
    yield first
    number = 2
    while True:
        yield first.with_name(f"{first.name}-{number}")
        number += 1

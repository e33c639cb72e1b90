"""Processes that tests of whole runs start: what they print, and what they leave behind."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path


def await_line(process: subprocess.Popen[str], start: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return
    raise AssertionError(f"no line starts with {start!r}; stderr: {process.communicate()[1]}")


def descriptors_of_children(pid: int) -> list[int]:
    """Of any of its threads; by these it can be told of each whether it is gone."""
    found = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    return [os.pidfd_open(int(child)) for each in found for child in each]


def gone(processes: list[int]) -> bool:
    return all(select.select([process], [], [], 20.0)[0] for process in processes)

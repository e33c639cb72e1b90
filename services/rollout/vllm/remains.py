"""What vLLM's engine cores leave behind when they are killed: workers that still run, and shared memory.

Names in shared memory are random: whose they are is seen while the core lives, by what it has mapped.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Sequence
from pathlib import Path

SEGMENT = re.compile(r" (/dev/shm/psm_[0-9a-f]+)$", re.MULTILINE)  # as multiprocessing.shared_memory names them


class Remains:
    """Takes note of processes, their children and their shared memory while they live. VllmEngine holds one."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.segments: set[Path] = set()
        self._processes: list[int] = []
        for pid in [*pids, *(child for parent in pids for child in children_of(parent))]:
            with contextlib.suppress(OSError):  # it has ended already
                self.segments |= segments_of(pid)
                self._processes.append(os.pidfd_open(pid))

    def remove(self, wait_s: float) -> None:
        """Wait until the processes have ended, for so long at most; then remove what they have not removed."""
        deadline = time.monotonic() + wait_s
        for process in self._processes:
            select.select([process], [], [], max(0.0, deadline - time.monotonic()))
            os.close(process)
        self._processes = []
        for segment in self.segments:
            segment.unlink(missing_ok=True)


def children_of(pid: int) -> list[int]:
    """Ids of the processes that a process has started and that live."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def segments_of(pid: int) -> set[Path]:
    """The segments of multiprocessing's shared memory that a process has mapped."""
    return {Path(path) for path in SEGMENT.findall(Path(f"/proc/{pid}/maps").read_text())}

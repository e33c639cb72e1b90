"""The memory of this process."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def memory_figures() -> dict[str, float]:
    """Resident memory of this process in MiB: now, and the most that it has had."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory/resident_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "memory/peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }

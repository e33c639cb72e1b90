"""A service as a child process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stretto.child import Child

SHOW = "import os; print(sorted(os.sched_getaffinity(0)), os.nice(0), os.environ['NUMBER'])"


async def test_a_child_runs_on_its_cores_and_steps_back_as_told(tmp_path: Path) -> None:
    core, output = min(os.sched_getaffinity(0)), tmp_path / "out"
    command = [sys.executable, "-c", SHOW]
    child = await Child.start("one", command, environment={"NUMBER": "7"}, cores=[core], output=output, niceness=3)
    assert await child.wait() == 0
    assert output.read_text().strip() == f"[{core}] {os.nice(0) + 3} 7"

"""Stands in for `python -m stretto` in a test: the learner's checkpoints are not written before a file is there.

The file is `may-write` in the folder above the run folders.
"""

from __future__ import annotations

import sys
import time

from stretto.cli import main


def hold() -> None:
    from services.compute.checkpoint import Checkpoints

    write = Checkpoints.write

    def held(checkpoints, captured):
        gate = checkpoints.folder.parents[1] / "may-write"
        while not gate.exists():
            time.sleep(0.02)
        return write(checkpoints, captured)

    Checkpoints.write = held


if __name__ == "__main__":
    if sys.argv[2] == "learner":
        hold()
    main()

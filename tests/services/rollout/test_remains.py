"""Clearing up after processes that were killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from services.rollout.vllm.remains import Remains

OWNER = """
import subprocess, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
resource_tracker.register = lambda *args: None  # who is killed with its tracker
segment = SharedMemory(create=True, size=64)
child = subprocess.Popen(["sleep", "1000"])
print(segment.name, child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner():
    command = [sys.executable, "-c", OWNER]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_the_shared_memory_of_a_killed_process_is_removed_and_no_other(owner):
    name, child = owner.stdout.readline().split()
    segment = Path("/dev/shm") / name
    other = SharedMemory(create=True, size=64)
    try:
        remains = Remains([owner.pid])
        assert remains.segments == {segment}
        owner.kill()
        assert segment.exists()
        os.kill(int(child), signal.SIGKILL)
        remains.remove(wait_s=20)
        assert not segment.exists() and (Path("/dev/shm") / other.name).exists()
    finally:
        other.close()
        other.unlink()


def test_a_process_that_has_ended_leaves_nothing_to_remove(owner):
    name, _ = owner.stdout.readline().split()
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait()
    remains = Remains([owner.pid])
    assert remains.segments == set()
    remains.remove(wait_s=20)
    (Path("/dev/shm") / name).unlink()


def test_it_waits_no_longer_than_it_is_told_for_a_child_that_goes_on_and_kills_nobody(owner):
    name, child = owner.stdout.readline().split()
    remains = Remains([owner.pid])
    owner.kill()
    remains.remove(wait_s=0.1)
    assert Path(f"/proc/{child}").exists() and not (Path("/dev/shm") / name).exists()

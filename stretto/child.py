"""One service as a child process: on its own cores, in its own process group, dead when its parent is. launcher.py uses it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
LAST_LINES = 8

_libc = ctypes.CDLL(None)


class Child:
    """A running process.

    What it writes on stdout and stderr goes to a file. served_version: the run's version when the process was first
    seen to serve, kept by the launcher. peak_memory_mib: the most memory that it and its own processes held, shared
    memory included.
    """

    def __init__(self, instance: str, process: asyncio.subprocess.Process, output: Path, output_start: int) -> None:
        self.instance = instance
        self.served_version: int | None = None
        self.peak_memory_mib = 0.0
        self._process = process
        self._output = output
        self._output_start = output_start

    @classmethod
    async def start(
        cls, instance: str, command: Sequence[str], *, environment: dict[str, str], cores: Sequence[int], output: Path
    ) -> Child:
        """Start `command` on `cores`, with `environment` added to this process's own."""
        with output.open("ab") as file:
            start = file.tell()
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
                preexec_fn=_before_exec(os.getpid(), set(cores)),
            )
        return cls(instance, process, output, start)

    @property
    def pid(self) -> int:
        """Id of the process, and of its group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """The exit code, once it has ended; minus the signal's number where a signal ended it."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask it to end."""
        if self.running:
            self._process.terminate()

    def kill(self) -> None:
        """End it at once, with all processes of its group, also those it left behind."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all gone already

    def measure(self) -> None:
        """Update `peak_memory_mib`."""
        try:
            family = [self.pid, *(child.pid for child in psutil.Process(self.pid).children(recursive=True))]
            self.peak_memory_mib = max(self.peak_memory_mib, sum(_peak_mib(pid) for pid in family))
        except (psutil.Error, OSError):
            pass  # it has just ended: the last figure stands

    def last_words(self) -> str:
        """The sentence that it ended with: what follows its own name on its output, or else the last lines there."""
        with self._output.open("rb") as file:
            file.seek(self._output_start)
            text = file.read().decode("utf-8", "replace").strip()
        _, own, sentence = f"\n{text}".rpartition(f"\n{self.instance}: ")
        return sentence if own else "\n".join(text.splitlines()[-LAST_LINES:])


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def _before_exec(parent: int, cores: set[int]) -> Callable[[], None]:
    """What the new process does before it becomes the service."""

    def prepare() -> None:
        if sys.platform != "linux":
            return
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)
        os.sched_setaffinity(0, cores)

    return prepare


def _peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0

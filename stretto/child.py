"""One service as a child process of launcher.py: on its own cores, in its own group, dead when its parent is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from services.process import die_with
from shared.errors import ConfigError, RunStopped

LAST_LINES = 8


class Child:
    """A service process. What it writes on stdout and stderr goes to a file, which keeps it after its death."""

    def __init__(self, instance: str, process: asyncio.subprocess.Process, output: Path, output_start: int) -> None:
        self.instance = instance
        self.pid = process.pid
        self._process = process
        self._output = output
        self._output_start = output_start

    @classmethod
    async def start(
        cls,
        instance: str,
        command: Sequence[str],
        *,
        environment: dict[str, str],
        cores: Sequence[int],
        output: Path,
        niceness: int = 0,
    ) -> Child:
        """Start `command` on `cores`, with `environment` added to this process's own.

        It is killed when the thread that calls this ends: call it from the main thread's event loop.
        """
        with output.open("ab") as file:
            start = file.tell()
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
                preexec_fn=_before_exec(os.getpid(), cores, niceness),
            )
        return cls(instance, process, output, start)

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """The exit code, once the process has ended and all that it left behind was killed."""
        code = await self._process.wait()
        self.kill()
        return code

    def terminate(self) -> None:
        """Ask it to end."""
        if self.running:
            self._process.terminate()

    def kill(self) -> None:
        """End it at once, with all processes of its group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # all gone already

    @property
    def succeeded(self) -> bool:
        """Whether it ended without an error."""
        return self._process.returncode == 0

    @property
    def ended_the_run(self) -> bool:
        """Whether a broker ended because its run did, well or badly."""
        return self._process.returncode in (0, RunStopped.exit_code)

    @property
    def hopeless(self) -> bool:
        """Whether it ended with an error that no restart can mend."""
        return self._process.returncode == ConfigError.exit_code

    def last_words(self) -> str:
        """Why it ended: what it wrote last under its own name, or else its exit code and the last lines it wrote."""
        with self._output.open("rb") as file:
            file.seek(self._output_start)
            text = file.read().decode("utf-8", "replace").strip()
        _, own, sentence = f"\n{text}".rpartition(f"\n{self.instance}: ")
        if own:
            return f"{self.instance}: {sentence}"
        code = self._process.returncode or 0
        if code in (-signal.SIGKILL, -signal.SIGTERM):  # it had nothing to say
            return f"{self.instance} was ended by {signal.Signals(-code).name}"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return "\n".join([f"{self.instance} {how}", *text.splitlines()[-LAST_LINES:]])


def _before_exec(parent: int, cores: Sequence[int], niceness: int) -> Callable[[], None]:
    """What the new process does before it becomes the service."""

    def prepare() -> None:
        die_with(parent)
        os.sched_setaffinity(0, cores)
        os.nice(niceness)
        # Where the kernel groups processes by session, the niceness of the group counts between sessions.
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as autogroup:
            autogroup.write(str(niceness))

    return prepare

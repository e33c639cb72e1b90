"""A process that scores samples, one call at a time: by synchronous functions (pool.py) or by a model (batches.py)."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal as signals
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from services.process import die_with
from services.reward.signals import Function, Score, invalid, no_answer, raised, read_answer
from shared.config import Signal
from shared.errors import StrettoError

START_DEADLINE_S = 120.0
END_DEADLINE_S = 5.0

# A forked worker would share this process's sockets and the descriptor through which its loop sees signals.
_spawn = multiprocessing.get_context("spawn")


class Worker:
    """One process and the pipe to it. After a call that hangs or ends the process, the next call starts another.

    Only names and plain values go through the pipe; the process loads functions and models by reference. timeout_s: for
    each sample of a call. start_s: for loading.
    """

    def __init__(self, signals: list[Signal], timeout_s: float, start_s: float = START_DEADLINE_S) -> None:
        self._signals = signals
        self._timeout_s = timeout_s
        self._start_s = start_s
        self._process: SpawnProcess | None = None
        self._pipe: Connection

    async def ready(self) -> str | None:
        """Have a process that has loaded the signals. Returns why there is none, where that fails."""
        if self._process is not None and self._process.is_alive():
            return None
        self._kill()
        self._start()
        fault: str | None
        try:
            fault = await self._receive(self._start_s)
        except TimeoutError:
            fault = f"a reward worker did not load {self._names} in {self._start_s:.0f} s"
        except (EOFError, OSError):
            fault = f"a reward worker ended while it loaded {self._names}"
        except asyncio.CancelledError:
            self._kill()
            raise
        if fault:
            self._kill()
        return fault

    async def score(self, signal: str, samples: list[dict[str, Any]]) -> list[Score]:
        """The score of each sample. What raises makes its sample invalid; what hangs or ends the process, all."""
        if fault := await self.ready():
            return [invalid(fault)] * len(samples)
        timeout_s = self._timeout_s * len(samples)
        try:
            self._pipe.send((signal, samples))
            scores: list[Score] = await self._receive(timeout_s)
        except TimeoutError:
            self._kill()
            return [no_answer(signal, timeout_s)] * len(samples)
        except (EOFError, OSError):
            return [invalid(f"{signal} ended its process (exit code {await self.end()})")] * len(samples)
        except asyncio.CancelledError:
            self._kill()
            raise
        return scores

    async def end(self) -> int | None:
        """End the process, whatever it is doing. Returns its exit code."""
        process = self._kill()
        if process is None:
            return None
        await asyncio.to_thread(process.join, END_DEADLINE_S)
        return process.exitcode

    @property
    def _names(self) -> str:
        return ", ".join(signal.name for signal in self._signals)

    def _start(self) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(theirs, self._signals, os.getpid()), name="reward worker")
        self._process.start()
        theirs.close()

    def _kill(self) -> SpawnProcess | None:
        """Kill the process and what it started. Returns it, to be joined; a process that ended keeps its exit code."""
        process, self._process = self._process, None
        if process is not None:
            assert process.pid is not None
            with suppress(ProcessLookupError):  # it ended, or has no group of its own yet
                os.killpg(process.pid, signals.SIGKILL)
            process.kill()
            self._pipe.close()
        return process

    async def _receive(self, within_s: float) -> Any:
        """The next message of the process. Raises TimeoutError, and EOFError or OSError where the process ended."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pipe.fileno(), readable.set)
        try:
            async with asyncio.timeout(within_s):
                await readable.wait()
        finally:
            loop.remove_reader(self._pipe.fileno())
        return self._pipe.recv()


def _serve(pipe: Connection, signals: list[Signal], parent: int) -> None:
    """The process: load the signals, tell how that went, then answer calls until the service closes the pipe."""
    # A group of its own: a terminal's Ctrl-C is for the service alone, and what a function starts ends with it.
    os.setsid()
    die_with(parent)
    try:
        loaded = {signal.name: _load(signal) for signal in signals}
    except StrettoError as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    with suppress(EOFError):
        while True:
            name, samples = pipe.recv()
            pipe.send(loaded[name](samples))


def _load(signal: Signal) -> Callable[[list[dict[str, Any]]], list[Score]]:
    """What scores samples by a signal. Raises StrettoError where it cannot be loaded."""
    if signal.model is not None:
        from services.reward.model import RewardModel

        return RewardModel(signal).score
    function = Function(signal)
    function.prepare()
    return lambda samples: [_call(function, arguments) for arguments in samples]


def _call(function: Function, arguments: dict[str, Any]) -> Score:
    try:
        return read_answer(function.call(arguments), function.signal.name)
    except (Exception, SystemExit) as error:
        return raised(function.signal.name, error)

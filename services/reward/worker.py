"""A process that runs synchronous reward functions, one call at a time. The pool owns it and gives it the calls."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal as signals
from contextlib import suppress
from multiprocessing.connection import Connection
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

    Only names and plain values go through the pipe; the process loads the functions by reference.
    """

    def __init__(self, functions: list[Signal], timeout_s: float) -> None:
        self._functions = functions
        self._timeout_s = timeout_s
        self._start()

    async def ready(self) -> str | None:
        """Wait until the functions are loaded. Returns why that failed, where it did."""
        if self._loading:
            try:
                self._fault = await self._receive(START_DEADLINE_S)
            except TimeoutError:
                self._fault = f"a reward worker did not load its functions in {START_DEADLINE_S:.0f} s"
            except (EOFError, OSError):
                self._fault = "a reward worker ended while it loaded its functions"
            self._loading = False
        return self._fault

    async def score(self, signal: str, arguments: dict[str, Any]) -> Score:
        """The score of one sample. A function that raises, hangs or ends the process makes it invalid."""
        if self._dropped or not self._process.is_alive():
            self._start()
        try:
            if fault := await self.ready():
                self._drop()
                return invalid(fault)
            self._pipe.send((signal, arguments))
            score: Score = await self._receive(self._timeout_s)
        except TimeoutError:
            self._drop()
            return no_answer(signal, self._timeout_s)
        except (EOFError, OSError):
            await asyncio.to_thread(self._process.join, END_DEADLINE_S)
            self._drop()
            return invalid(f"{signal} ended its process (exit code {self._process.exitcode})")
        except asyncio.CancelledError:
            self._drop()
            raise
        return score

    async def end(self) -> None:
        """End the process, whatever it is doing."""
        self._drop()
        await asyncio.to_thread(self._process.join, END_DEADLINE_S)

    def _start(self) -> None:
        self._pipe, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(theirs, self._functions, os.getpid()), name="reward worker")
        self._process.start()
        theirs.close()
        self._loading, self._dropped = True, False
        self._fault: str | None = None

    def _drop(self) -> None:
        """Kill the process and what it started."""
        if self._dropped:
            return
        with suppress(ProcessLookupError):  # it ended itself, or has no group of its own yet
            os.killpg(self._process.pid or 0, signals.SIGKILL)
        self._process.kill()
        self._pipe.close()
        self._dropped = True

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
    """The process: load the functions, tell how that went, then answer calls until the service closes the pipe."""
    # A group of its own: a terminal's Ctrl-C is for the service alone, and what a function starts ends with it.
    os.setsid()
    die_with(parent)
    functions: dict[str, Function] = {}
    try:
        for signal in signals:
            functions[signal.name] = Function(signal)
            functions[signal.name].prepare()
    except StrettoError as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    with suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            pipe.send(_call(functions[name], arguments))


def _call(function: Function, arguments: dict[str, Any]) -> Score:
    try:
        return read_answer(function.call(arguments), function.signal.name)
    except (Exception, SystemExit) as error:
        return raised(function.signal.name, error)

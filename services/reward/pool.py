"""Worker processes for synchronous reward functions: each call has a deadline, a worker that hangs is replaced."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired, ProcessPool

from services.process import die_with
from services.reward.signals import Function, Score, invalid, read_answer
from shared.config import Signal
from shared.errors import StrettoError
from shared.log import log

START_DEADLINE_S = 120.0

# In a worker, by the name of the signal: its function, or why it has none.
_functions: dict[str, Function | StrettoError] = {}


class WorkerPool:
    """Runs functions by the name of their signal; nothing but names and plain values goes to the workers."""

    def __init__(self, signals: list[Signal], workers: int, timeout_s: float) -> None:
        self._signals = signals
        self._workers = workers
        self._timeout_s = timeout_s
        self._pool = self._new_pool()

    async def start(self) -> None:
        """Start the workers. Raises StrettoError where they do not come up or cannot load a function."""
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                fault = await asyncio.wrap_future(self._pool.schedule(_first_fault))
        except TimeoutError:
            fault = f"the reward workers did not load their functions in {START_DEADLINE_S:.0f} s"
        except BrokenProcessPool:
            fault = "the reward workers ended while they loaded their functions"
        if fault is not None:
            raise StrettoError(fault)

    async def score(self, signal: str, arguments: dict[str, Any]) -> Score:
        """The score of one sample. A function that raises, hangs or kills its process makes it invalid."""
        for _ in range(2):
            pool = self._pool
            try:
                return await asyncio.wrap_future(pool.schedule(_call, [signal, arguments], timeout=self._timeout_s))
            except TimeoutError:
                return invalid(f"{signal} gave no answer in {self._timeout_s:g} s")
            except ProcessExpired as error:
                return invalid(f"{signal} ended its process (exit code {error.exitcode})")
            except RuntimeError:  # a worker died between two calls, and the pool gave itself up
                await self._replace(pool)
        return invalid(f"{signal} has no worker: they end on their own")

    async def close(self) -> None:
        """End the workers, whatever they are doing."""
        await asyncio.to_thread(_end, self._pool)

    def _new_pool(self) -> ProcessPool:
        # Forked workers would share this process's sockets and the descriptor through which its loop sees signals.
        return ProcessPool(
            max_workers=self._workers,
            initializer=_load_functions,
            initargs=[self._signals, os.getpid()],
            context=multiprocessing.get_context("spawn"),
        )

    async def _replace(self, broken: ProcessPool) -> None:
        if self._pool is broken:
            log.warning("a reward worker died; all are started again")
            self._pool = self._new_pool()
            await asyncio.to_thread(_end, broken)


def _end(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


def _load_functions(signals: list[Signal], parent: int) -> None:
    """In a new worker: load the functions by reference."""
    die_with(parent)
    for signal in signals:
        try:
            function = Function(signal)
            function.prepare()
        except StrettoError as error:
            _functions[signal.name] = error
        else:
            _functions[signal.name] = function


def _first_fault() -> str | None:
    return next((str(found) for found in _functions.values() if isinstance(found, StrettoError)), None)


def _call(signal: str, arguments: dict[str, Any]) -> Score:
    function = _functions[signal]
    if isinstance(function, StrettoError):
        return invalid(str(function))
    try:
        return read_answer(function.call(arguments), signal)
    except (Exception, SystemExit) as error:
        return invalid(f"{signal} raised {type(error).__name__}: {error}")

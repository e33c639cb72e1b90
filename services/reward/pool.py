"""Worker processes for synchronous reward functions: each call has a deadline, a worker that hangs is replaced."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal as signals
import sys
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from pebble import ProcessExpired, ProcessPool

from services.process import die_with
from services.reward.signals import Function, Score, invalid, read_answer
from shared.config import Signal

_loaded: dict[str, Function] = {}


class WorkerPool:
    """Runs functions by the name of their signal; nothing but names and plain values goes to the workers."""

    def __init__(self, functions: list[Signal], workers: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # Forked workers would share this process's sockets and the descriptor through which its loop sees signals.
        self._pool = ProcessPool(
            max_workers=workers,
            initializer=_load_functions,
            initargs=[functions, sys.path, os.getpid()],
            context=multiprocessing.get_context("spawn"),
        )

    async def score(self, signal: str, arguments: dict[str, Any]) -> Score:
        """The score of one sample. A function that raises, hangs or kills its process makes it invalid."""
        future = self._pool.schedule(_call, args=[signal, arguments], timeout=self._timeout_s)
        try:
            return await asyncio.wrap_future(future)
        except (TimeoutError, FutureTimeout):
            return invalid(f"{signal} gave no answer in {self._timeout_s:g} s")
        except ProcessExpired as error:
            return invalid(f"{signal} ended its process (exit code {error.exitcode})")

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        self._pool.stop()
        self._pool.join()


def _load_functions(functions: list[Signal], path: list[str], parent: int) -> None:
    """In a new worker: load the functions by reference. The parent decides when it ends."""
    signals.signal(signals.SIGINT, signals.SIG_IGN)
    die_with(parent)
    sys.path[:] = path
    _loaded.update({signal.name: Function(signal) for signal in functions})


def _call(signal: str, arguments: dict[str, Any]) -> Score:
    try:
        return read_answer(_loaded[signal].call(arguments), signal)
    except Exception as error:
        return invalid(f"{signal} raised {type(error).__name__}: {error}")

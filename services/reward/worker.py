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
from services.reward.signals import Function, Score, call_failed, invalid, no_answer, read_answer
from shared.config import Signal
from shared.errors import StrettoError

START_DEADLINE_S = 120.0

# A forked worker would share this process's sockets and the descriptor through which its loop sees signals.
_spawn = multiprocessing.get_context("spawn")


class Worker:
    """One process and the pipe to it; a new one takes its place when it hangs or ends.

    Only names and plain values go to it; it loads the functions by reference.
    """

    def __init__(self, functions: list[Signal], timeout_s: float) -> None:
        self._functions = functions
        self._timeout_s = timeout_s
        self._start()

    async def ready(self) -> str | None:
        """Wait until the functions are loaded. Returns what is wrong with them, if anything is."""
        if self._fault is _NOT_READY:
            try:
                self._fault = await self._receive(START_DEADLINE_S)
            except TimeoutError:
                self._fault = f"a reward worker did not load its functions in {START_DEADLINE_S:.0f} s"
            except (EOFError, OSError):
                self._fault = "a reward worker ended while it loaded its functions"
        return self._fault

    async def score(self, signal: str, arguments: dict[str, Any]) -> Score:
        """The score of one sample. A function that raises, hangs or ends the process makes it invalid."""
        if self._fault or not self._process.is_alive():
            await self.restart()
'''

"""The worker processes of a reward service, shared by all calls of synchronous functions. For score.py."""

from __future__ import annotations

import asyncio
from typing import Any

from services.reward.signals import Score
from services.reward.worker import Worker
from shared.config import Signal
from shared.errors import StrettoError


class WorkerPool:
    """Runs functions by the name of their signal, in the order of the calls, each in the first worker that is free."""

    def __init__(self, functions: list[Signal], workers: int, timeout_s: float) -> None:
        self._workers = [Worker(functions, timeout_s) for _ in range(workers)]
        self._free: asyncio.Queue[Worker] = asyncio.Queue()

    async def start(self) -> None:
        """Start the workers. Raises StrettoError where one cannot load the functions."""
        faults = await asyncio.gather(*(worker.ready() for worker in self._workers))
        for worker, fault in zip(self._workers, faults, strict=True):
            if fault is not None:
                raise StrettoError(fault)
            self._free.put_nowait(worker)

    async def score(self, signal: str, arguments: dict[str, Any]) -> Score:
        """The score of one sample by one signal; its time starts when a worker takes it."""
        worker = await self._free.get()
        try:
            (score,) = await worker.score(signal, [arguments])
            return score
        finally:
            self._free.put_nowait(worker)

    async def close(self) -> None:
        """End the workers, whatever they are doing."""
        for worker in self._workers:
            await worker.end()

"""Brings the samples of all groups in flight to a reward model in batches, in a process of its own. For score.py."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from services.reward.signals import Score
from services.reward.worker import Worker
from shared.config import Signal
from shared.errors import StrettoError

START_DEADLINE_S = 600.0
"""Time for loading a model."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A sample that waits for its score. length: in characters, of the completion."""

    sample: dict[str, Any]
    length: int
    score: Score | None = None


class Batches:
    """One model and the samples that wait for it.

    Each batch has the sample that has waited longest and those whose lengths are closest to its own, so that little is
    padded and none waits for ever.
    """

    def __init__(self, signal: Signal, timeout_s: float) -> None:
        self._signal = signal
        self._worker = Worker([signal], timeout_s, START_DEADLINE_S)
        self._waiting: list[_Waiting] = []
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Load the model. Raises StrettoError where that fails."""
        if fault := await self._worker.ready():
            raise StrettoError(fault)

    async def score(self, arguments: dict[str, Any]) -> Score:
        """The score of one sample; whoever has waited longest for the model takes others along."""
        own = _Waiting({name: arguments[name] for name in ("messages", "completion")}, len(arguments["completion"]))
        self._waiting.append(own)
        try:
            await asyncio.sleep(0)  # the other samples of a group come in the same round of the loop
            async with self._turn:
                if own.score is None:
                    await self._score_with(own)
        finally:
            if own in self._waiting:
                self._waiting.remove(own)
        assert own.score is not None
        return own.score

    async def close(self) -> None:
        """End the process, whatever it is doing."""
        await self._worker.end()

    async def _score_with(self, oldest: _Waiting) -> None:
        self._waiting.sort(key=lambda other: (other is not oldest, abs(other.length - oldest.length)))
        batch = self._waiting[: self._signal.batch_size]
        scores = await self._worker.score(self._signal.name, [waiting.sample for waiting in batch])
        for waiting, score in zip(batch, scores, strict=True):
            waiting.score = score
            if waiting in self._waiting:
                self._waiting.remove(waiting)

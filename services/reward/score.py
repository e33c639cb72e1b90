"""Scores a group: all signals of all samples, tried again where they fail, combined into the columns of the stage."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from services.reward.batches import Batches
from services.reward.pool import WorkerPool
from services.reward.servers import RewardServer
from services.reward.signals import (
    Function,
    Score,
    arguments_of,
    finite,
    invalid,
    no_answer,
    ok,
    raised,
    read_answer,
)
from shared.config import OwnStage, Reward
from shared.errors import StrettoError
from shared.graph import scores as score_columns
from shared.group import Columns, RewardStatus, TrajectoryGroup, ragged_text

ASYNC_AT_ONCE = 64


class Scorer:
    """The reward (or the cost, or a stage of the run's own): its signals, clipped and weighted."""

    def __init__(self, settings: Reward, stage: str = "reward") -> None:
        """Loads the functions. Raises PluginError or ConfigError where one cannot be."""
        self._settings = settings
        self._stage = stage
        self._functions = {s.name: Function(s) for s in settings.signals if s.function is not None}
        self._models = {s.name: Batches(s, settings.timeout_s) for s in settings.signals if s.model is not None}
        self._servers = {s.name: RewardServer(s, settings) for s in settings.signals if s.server is not None}
        self._weights = {s.name: s.weight for s in settings.signals}
        self._clips = {s.name: s.clip for s in settings.signals if s.clip is not None}
        self._pool: WorkerPool | None = None
        self._async_room = asyncio.Semaphore(ASYNC_AT_ONCE)

    async def start(self) -> None:
        """Start the workers, load the models and make what is called. Raises StrettoError where that fails."""
        blocking = [f.signal for f in self._functions.values() if not f.is_async]
        for function in self._functions.values():
            if function.is_async:
                function.prepare()
        if blocking:
            self._pool = WorkerPool(blocking, self._settings.workers, self._settings.timeout_s)
            await self._pool.start()
        for model in self._models.values():  # one after the other, as loading takes the most memory
            await model.start()

    async def score(self, group: TrajectoryGroup) -> Columns:
        """The columns of the stage. What a stage before it has left out is invalid, and not scored.

        Raises StrettoError where no sample that is there has a valid score, with the commonest reason.
        """
        left_out = _left_out(group)
        names = list(self._weights)
        scores = await asyncio.gather(
            *(
                self._try(name, given, left_out[sample])
                for sample, given in enumerate(arguments_of(group))
                for name in names
            )
        )
        by_sample = [
            dict(zip(names, scores[i : i + len(names)], strict=True)) for i in range(0, len(scores), len(names))
        ]
        rewards = [
            combine(sample, self._weights) if out is None else invalid(out)
            for sample, out in zip(by_sample, left_out, strict=True)
        ]
        asked = [reward for reward, out in zip(rewards, left_out, strict=True) if out is None]
        if asked and all(reward.status is not RewardStatus.OK for reward in asked):
            reason, count = Counter(reward.reason for reward in asked).most_common(1)[0]
            raise StrettoError(f"no sample has a valid {self._stage}; {count} of {len(asked)}: {reason}")
        if isinstance(self._settings, OwnStage) and (least := self._settings.at_least) is not None:
            rewards = [
                invalid(f"{r.value:g} is below {least:g}") if r.status is RewardStatus.OK and r.value < least else r
                for r in rewards
            ]
        value, status = score_columns(self._stage)
        columns: Columns = {
            value: np.array([r.value if r.status is RewardStatus.OK else 0.0 for r in rewards], dtype="f4"),
            status: np.array([r.status for r in rewards], dtype="u1"),
        }
        if self._stage in ("reward", "cost"):
            columns |= ragged_text(f"{self._stage}_reasons", [r.reason for r in rewards])
        for name in names:
            columns[f"signal/{name}"] = np.array([s[name].value for s in by_sample], dtype="f4")
            columns[f"signal_status/{name}"] = np.array([s[name].status for s in by_sample], dtype="u1")
        return columns

    async def close(self) -> None:
        """End the workers and the models."""
        if self._pool is not None:
            await self._pool.close()
        for model in self._models.values():
            await model.close()
        for server in self._servers.values():
            await server.close()

    async def _try(self, name: str, arguments: dict[str, Any], left_out: str | None) -> Score:
        """One signal of one sample, scored again while it is invalid, and clipped."""
        if left_out is not None:
            return invalid(left_out)
        score = invalid("not scored")
        attempts = 1 if name in self._servers else self._settings.attempts  # a server's requests are tried again below
        for _ in range(attempts):
            score = await self._call(name, arguments)
            if score.status is not RewardStatus.INVALID:
                break
        if score.status is RewardStatus.OK and name in self._clips:
            low, high = self._clips[name]
            return ok(min(max(score.value, low), high))
        return score

    async def _call(self, name: str, arguments: dict[str, Any]) -> Score:
        if name in self._servers:
            return await self._servers[name].score(arguments)
        if name in self._models:
            return await self._models[name].score(arguments)
        function = self._functions[name]
        if not function.is_async:
            assert self._pool is not None
            return await self._pool.score(name, arguments)
        deadline = asyncio.timeout(self._settings.timeout_s)
        try:
            async with self._async_room, deadline:
                return read_answer(await function.call(arguments), name)
        except Exception as error:
            if deadline.expired():
                return no_answer(name, self._settings.timeout_s)
            return raised(name, error)


def _left_out(group: TrajectoryGroup) -> list[str | None]:
    """Of each sample, which stage before has left it out."""
    found: list[str | None] = [None] * group.n_samples
    for name, statuses in group.columns.items():
        if name.startswith("stage_status/"):
            for sample in np.flatnonzero(statuses == RewardStatus.INVALID):
                found[sample] = f"left out by the stage {name.partition('/')[2]}"
    return found


def combine(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """Σ weight · value over the signals that gave one; invalid where a signal is, or where none gave a value."""
    if reasons := [score.reason for score in scores.values() if score.status is RewardStatus.INVALID]:
        return invalid("; ".join(reasons))
    values = {name: score.value for name, score in scores.items() if score.status is RewardStatus.OK}
    if not values:
        return invalid("no signal: all abstained")
    return finite(sum(weights[name] * value for name, value in values.items()), "the weighted sum is")

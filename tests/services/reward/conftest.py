"""Groups and signals for the tests of the reward service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.reward.score import Scorer
from shared.config import OwnStage, Reward, Signal
from shared.group import FinishReason, Prompt, TrajectoryGroup, ragged, ragged_text

FUNCTIONS = Path(__file__).with_name("functions.py")

StartScorer = Callable[..., Awaitable[Scorer]]


def signal(function: str, name: str = "s", **settings: Any) -> Signal:
    """A signal by a function of functions.py, or by a built-in one."""
    known = function if function.startswith("builtin ") else f"{FUNCTIONS}:{function}"
    return Signal(name=name, function=known.removeprefix("builtin "), **settings)


def group(*completions: str, **fields: Any) -> TrajectoryGroup:
    """A group with these samples, of 0, 1, 2, … tokens."""
    n = len(completions)
    return TrajectoryGroup(
        "g1",
        "train",
        Prompt(0, 0, [{"role": "user", "content": "2+2?"}], fields),
        columns={
            **ragged("tokens", [range(i) for i in range(n)], "i4"),
            **ragged_text("text", completions),
            "finish_reasons": np.full(n, FinishReason.LENGTH, dtype="u1"),
        },
    )


@pytest.fixture(name="group")
def _group() -> Callable[..., TrajectoryGroup]:
    return group


@pytest.fixture(name="signal")
def _signal() -> Callable[..., Signal]:
    return signal


@pytest.fixture
async def start_scorer() -> AsyncIterator[StartScorer]:
    """Starts scorers of some signals and ends them after the test."""
    async with AsyncExitStack() as stack:

        async def start(*signals: Signal, stage: str = "reward", **settings: Any) -> Scorer:
            is_own = stage not in ("reward", "cost")
            section = (
                OwnStage(name=stage, signals=signals, **settings) if is_own else Reward(signals=signals, **settings)
            )
            scorer = Scorer(section, stage)
            stack.push_async_callback(scorer.close)
            await scorer.start()
            return scorer

        yield start

"""A reward server of one's own: `serve(score)` answers the runs whose signals name its address. See docs/rewards.md."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from protocol.channel import Server
from protocol.codec import Message
from protocol.messages import ScoreRequest, Scores
from shared.errors import ProtocolError

__all__ = ["serve"]


def serve(score: Callable[..., Any], bind: str = "tcp://127.0.0.1:5555", *, batch: bool = False) -> None:
    """Answer until interrupted.

    score: called with the arguments of a sample by name (`score(prompt, completion, **fields)`); it returns a number,
    None to abstain, or raises. It may be async. batch: it is called with a list of such maps and returns a list.
    Raises ConfigError where the address cannot be bound.
    """
    try:
        asyncio.run(_serve(score, bind, batch))
    except KeyboardInterrupt:
        pass


async def _serve(score: Callable[..., Any], bind: str, batch: bool) -> None:
    async def answer(message: Message) -> Scores:
        if not isinstance(message.body, ScoreRequest):
            raise ProtocolError("unknown_type", f"a reward server does not answer {message.body.type}")
        samples = message.body.samples
        if batch:
            found = await _call(lambda: score(samples))
            return Scores(scores=[_plain(s) for s in ([found] * len(samples) if isinstance(found, str) else found)])
        return Scores(scores=[_plain(await _call(lambda s=sample: score(**s))) for sample in samples])  # type: ignore[misc]

    await Server(bind, answer).run()


async def _call(function: Callable[[], Any]) -> Any:
    """What it returns, or the text of its error."""
    try:
        found = function()
        return await found if inspect.isawaitable(found) else found
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _plain(value: Any) -> float | dict[str, str] | None:
    if value is None or isinstance(value, dict):
        return value
    try:
        return float(value) if not isinstance(value, str) else {"invalid": value[:500]}
    except (TypeError, ValueError):
        return {"invalid": f"returned {type(value).__name__}, expected a number or None"}

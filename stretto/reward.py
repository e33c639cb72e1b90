"""A reward server of one's own: `serve(score)` answers the runs whose signals name its address. See docs/rewards.md."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
from collections.abc import Callable
from typing import Any

from protocol.channel import Server
from protocol.codec import Message
from protocol.messages import ScoreRequest, Scores
from shared.errors import ProtocolError
from shared.log import log

__all__ = ["serve"]

LONGEST_REASON = 500  # characters

Answer = float | dict[str, str] | None


def serve(score: Callable[..., Any], bind: str = "tcp://127.0.0.1:5555", *, batch: bool = False) -> None:
    """Answer until SIGINT (Ctrl-C) or SIGTERM.

    score: called with the arguments of a sample by name (`score(prompt, completion, **fields)`); it returns a number,
    None to abstain, or raises. It may be async. batch: it is called with a list of such maps and returns a list.
    Raises ConfigError where the address cannot be bound.
    """
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(score, bind, batch))


async def _serve(score: Callable[..., Any], bind: str, batch: bool) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    listening = server(score, bind, batch=batch)
    log.info("scores samples", address=listening.address)
    await listening.run()


def server(score: Callable[..., Any], bind: str, *, batch: bool = False) -> Server:
    """A server that answers with `score`; it listens already. Raises ConfigError where it cannot."""

    async def answer(message: Message) -> Scores:
        if not isinstance(message.body, ScoreRequest):
            raise ProtocolError("unknown_type", f"a reward server does not answer {message.body.type}")
        samples = message.body.samples
        if batch:
            return Scores(scores=await _batch(score, samples))
        return Scores(scores=[await _one(score, sample) for sample in samples])

    return Server(bind, answer)


async def _one(score: Callable[..., Any], sample: dict[str, Any]) -> Answer:
    try:
        return _plain(await _returned(score(**sample)))
    except Exception as error:
        return _invalid(error)


async def _batch(score: Callable[..., Any], samples: list[dict[str, Any]]) -> list[Answer]:
    try:
        scores = list(await _returned(score(samples)))
        if len(scores) != len(samples):
            raise ValueError(f"returned {len(scores)} scores for {len(samples)} samples")
    except Exception as error:
        return [_invalid(error)] * len(samples)
    return [_plain(value) for value in scores]


async def _returned(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def _plain(value: Any) -> Answer:
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):  # float("1") is 1
            raise TypeError("expected a number or None")
        return float(value)
    except Exception as error:  # whatever its __float__ raises
        return {"invalid": f"returned {type(value).__name__}: {_text(error)}"}


def _invalid(error: Exception) -> Answer:
    return {"invalid": f"{type(error).__name__}: {_text(error)}"}


def _text(error: Exception) -> str:
    """Its message as UTF-8 can carry it, which half a surrogate pair is not."""
    return str(error)[:LONGEST_REASON].encode(errors="backslashreplace").decode()

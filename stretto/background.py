"""An event loop in a thread of its own, so that it goes on where the caller has one running, as in a notebook."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from protocol.channel import Server
from stretto.reward import server

LOOPBACK = "tcp://127.0.0.1:0"
Result = TypeVar("Result")


class Background:
    """A loop that runs until it is closed or the process ends. close_s: time for its work to end when it is."""

    def __init__(self, name: str, *, close_s: float) -> None:
        self._close_s = close_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin some work there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What some work there comes to."""
        return self.submit(work).result()

    def close(self) -> None:
        """Cancel the work, and end the loop. A function that computes on after `close_s` is left behind."""
        self.submit(self._close())
        self._thread.join(self._close_s)
        if not self._thread.is_alive():
            self._loop.close()

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.call_soon(self._loop.stop)


def host(background: Background, functions: Sequence[Callable[..., Any]]) -> list[str]:
    """Answer for reward functions of this process, one sample at a time, there; returns the address of each.

    Nothing is pickled: closures, bound methods and lambdas work. Raises ConfigError where no address can be had.
    """

    async def servers() -> list[Server]:
        return [server(function, LOOPBACK) for function in functions]

    listening = background.call(servers())
    for each in listening:
        background.submit(each.run())
    return [each.address for each in listening]

"""Lets tasks wait until a condition on a state holds: it is looked at again after each change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Changes:
    """The changes of one state. Those between two turns of the event loop wake who waits once."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """The state has changed."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, condition: Callable[[], bool], wait_s: float | None) -> bool:
        """Wait until the condition holds, or the time (None: as long as it takes) is over; returns whether it does."""
        if condition():
            return True
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    await self._next.wait()
                    if condition():
                        return True
        except TimeoutError:
            return False

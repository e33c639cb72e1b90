"""The learner's side of its critics: they learn, save and go back with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from protocol.channel import Client
from protocol.codec import join_groups
from protocol.messages import Body, GoBack, Learn, Learned, Ok, Service, Store
from services.member import Member
from shared.errors import ProtocolError, StrettoError
from shared.group import Columns

Answer = TypeVar("Answer", bound=Body)


class Critics:
    """The critics of a run by name; none for most algorithms."""

    def __init__(self, progress_s: float) -> None:
        """progress_s: time that one of them may take for an update."""
        self._progress_s = progress_s
        self._clients: dict[str, Client] = {}

    async def connect(self, member: Member, names: Sequence[Service]) -> None:
        """Wait for all of them to be there. Raises Unreachable."""
        for name in names:
            self._clients[name] = Client(await member.locate(name), peer=name)

    async def learn(self, version: int, lessons: dict[str, list[Columns]]) -> dict[str, float]:
        """Have each make the update of `version` from its lessons; returns their metrics under their names."""
        found = await asyncio.gather(
            *(
                self._ask(name, Learn(version=version, groups=len(lessons[name])), Learned, join_groups(lessons[name]))
                for name in self._clients
            )
        )
        return {
            f"{name}/{k}": v for name, done in zip(self._clients, found, strict=True) for k, v in done.metrics.items()
        }

    async def store(self, version: int, lineage: int) -> None:
        """Have them save their state, which is that of `version`."""
        await asyncio.gather(*(self._ask(name, Store(version=version, lineage=lineage), Ok) for name in self._clients))

    async def go_back(self, version: int) -> None:
        """Have them go on from the checkpoint of `version`; 0: from the beginning."""
        await asyncio.gather(*(self._ask(name, GoBack(version=version), Ok) for name in self._clients))

    async def _ask(self, name: str, body: Body, answer: type[Answer], columns: Columns | None = None) -> Answer:
        """The answer. A refusal is an error that a new start of the learner, from its checkpoint, may mend."""
        try:
            reply, _ = await self._clients[name].request(body, answer, columns, wait_s=self._progress_s)
        except ProtocolError as refusal:
            raise StrettoError(f"{name}: {refusal.detail}") from None
        return reply

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            await client.close()

"""Collective broadcasts to rollouts that come and go: who takes part, in two phases, with a way out of each wait.

A round is prepared (members get an offer, make room, and join), and then transferred. A member commits by itself, when
its checksums are right: it follows again with the new version. One that comes back with the old version, or not at all,
has not, and the next round is made of those who came back. Nothing here ever waits for one member for longer than
`weights.progress_s`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from protocol.messages import Follow, Join, Offer, Round
from services.broadcaster.ring import Ring, Snapshot
from services.broadcaster.source import Source
from services.changes import Changes
from shared.collective import Backend, Group, Rendezvous
from shared.errors import BrokenTransfer, ProtocolError
from shared.log import log

GATHER_S = 1.0
"""For rollouts that are still busy with the last version, or with a round that broke off, to come to the next one."""
MOST_FAILURES = 3
"""Groups in a row that brought nothing, before their members get streams instead."""


@dataclass(slots=True)
class _Waiting:
    """A rollout that waits for the newest snapshot."""

    held: tuple[int, int]
    offer: asyncio.Future[Offer | None]


@dataclass(slots=True)
class _Round:
    """The round under way."""

    epoch: str
    snapshot: Snapshot
    size_bytes: int
    members: list[str]
    joined: set[str] = field(default_factory=set)
    is_open: bool = False
    is_over: bool = False


class Rounds:
    """Broadcasts each newest snapshot of the ring to the rollouts that follow it here."""

    def __init__(
        self,
        ring: Ring,
        changes: Changes,
        source: Callable[[Snapshot], Awaitable[Source]],
        *,
        backend: Backend,
        host: str,
        deltas: bool,
        progress_s: float,
    ) -> None:
        """host: where the members find each other; bound when the first of them comes."""
        self._ring = ring
        self._changes = changes
        self._source = source
        self._backend = backend
        self._host = host
        self._use_deltas = deltas
        self._progress_s = progress_s
        self._rendezvous: Rendezvous | None = None
        self._group: Group | None = None
        self._group_members: list[str] = []
        self._group_holds: tuple[int, int] | None = None
        self._made, self._token = 0, secrets.token_hex(4)
        self._known: set[str] = set()
        self._waiting: dict[str, _Waiting] = {}
        self._round: _Round | None = None
        self._failures = 0
        self._without_route: list[str] = []
        self.figures = {"weights/rounds": 0.0, "weights/broken_rounds": 0.0}

    def takes(self, instance: str) -> bool:
        """Whether a rollout should follow here: not where its group could not be made before."""
        return instance not in self._without_route

    async def follow(self, follow: Follow) -> Offer | None:
        """Wait for a round with a newer snapshot; None where there is none in time."""
        self._drop(follow.instance)
        waiting = _Waiting((follow.lineage, follow.version), asyncio.get_running_loop().create_future())
        self._waiting[follow.instance] = waiting
        self._known.add(follow.instance)
        self._changes.notify()
        try:
            async with asyncio.timeout(follow.wait_ms / 1000):
                return await waiting.offer
        except TimeoutError:
            return None
        finally:
            if self._waiting.get(follow.instance) is waiting:
                del self._waiting[follow.instance]

    def forget(self, instance: str) -> None:
        """A rollout is gone, or takes its weights in another way: it may be another process, without the group."""
        self._drop(instance)
        if instance in self._group_members:
            self._group_holds = None

    def _drop(self, instance: str) -> None:
        self._known.discard(instance)
        if (waiting := self._waiting.pop(instance, None)) and not waiting.offer.done():
            waiting.offer.set_result(None)
        self._changes.notify()

    async def join(self, join: Join) -> None:
        """A member is ready. Waits for the others; raises ProtocolError `aborted` where the round does not begin."""
        found = self._round
        if found is None or found.epoch != join.epoch or found.snapshot.id != (join.lineage, join.version):
            raise ProtocolError("aborted", f"there is no round of epoch {join.epoch} under way")
        if join.size_bytes != found.size_bytes:
            raise ProtocolError("aborted", f"{join.size_bytes} bytes instead of {found.size_bytes}")
        found.joined.add(join.instance)
        self._changes.notify()
        await self._changes.until(lambda: found.is_open or found.is_over, None)
        if not found.is_open:
            missing = sorted(set(found.members) - found.joined)
            raise ProtocolError("aborted", f"the round began without {', '.join(missing)}, or not at all")

    async def run(self) -> None:
        """Hold rounds until cancelled."""
        await self._changes.until(lambda: bool(self._known), None)
        self._rendezvous = await asyncio.to_thread(Rendezvous, self._host)  # imports torch, which takes a second
        try:
            while True:
                await self._changes.until(lambda: bool(self._behind()), None)
                await self._changes.until(lambda: self._known <= set(self._waiting), GATHER_S)
                if late := sorted(self._known - set(self._waiting)):
                    log.info("a broadcast does not wait for rollouts that are busy or gone", rollouts=late)
                self._known &= set(self._waiting)
                await self._hold_round()
        finally:
            self._close_group()

    def _behind(self) -> list[str]:
        newest = self._ring.newest
        return [
            instance for instance, waiting in self._waiting.items() if newest is not None and newest.id > waiting.held
        ]

    async def _hold_round(self) -> None:
        """One round with all who wait and are behind."""
        start, members, snapshot = time.perf_counter(), {}, None
        for member in sorted(self._behind()):
            held = self._waiting[member].held
            if offered := self._ring.offer(member, *held):
                members[member], snapshot = held, offered
            else:
                self._drop(member)
        if snapshot is None:
            return
        source = await self._source(snapshot)
        deltas = await self._deltas(source, set(members.values()))
        sent = source.buckets if deltas is None else [np.frombuffer(bytearray(d), "u1") for d in deltas]
        current = self._round = self._begin(source, members, deltas)
        try:
            if not current.members:
                raise BrokenTransfer("nobody waits any more")
            if not await self._changes.until(lambda: set(current.members) <= current.joined, self._progress_s):
                raise BrokenTransfer(f"{', '.join(sorted(set(current.members) - current.joined))} did not join")
            current.is_open = True
            self._changes.notify()
            await asyncio.to_thread(self._send, current, sent)
        except BrokenTransfer as error:
            self._broken(current, error)
            return
        finally:
            current.is_over, self._round = True, None
            for member in members:
                self._ring.release(member)
            self._changes.notify()
        self._failures, self._group_holds = 0, snapshot.id
        full = sum(bucket.nbytes for bucket in source.buckets)
        sent_bytes = sum(piece.nbytes for piece in sent)
        self.figures["weights/rounds"] += 1
        log.info(
            "broadcast",
            version=snapshot.version,
            members=current.members,
            epoch=current.epoch,
            bytes=sent_bytes,
            bytes_saved=full - sent_bytes,
            seconds=time.perf_counter() - start,
        )

    async def _deltas(self, source: Source, held: set[tuple[int, int]]) -> list[bytes] | None:
        """Where all members have one version, and it is still there."""
        base = self._ring.find(*held.pop()) if self._use_deltas and len(held) == 1 else None
        return None if base is None else await asyncio.to_thread(source.deltas, base)

    def _begin(self, source: Source, held: dict[str, tuple[int, int]], deltas: list[bytes] | None) -> _Round:
        """Offer the round to those members who still wait, with the group of the last one if all of it is whole."""
        members = [m for m in held if m in self._waiting and not self._waiting[m].offer.done()]
        if members != self._group_members or {held[member] for member in members} != {self._group_holds}:
            self._close_group()
        if self._group is None:
            self._made += 1
        self._group_members = members
        assert self._rendezvous is not None
        epoch, snapshot = f"{self._token}-{self._made}", source.snapshot
        sizes = None if deltas is None else [len(coded) for coded in deltas]
        for rank, member in enumerate(members, 1):
            part = Round(epoch=epoch, rank=rank, size=len(members) + 1, port=self._rendezvous.port, delta_bytes=sizes)
            offer = Offer(
                path=source.path,
                slot=snapshot.slot,
                lineage=snapshot.lineage,
                version=snapshot.version,
                manifest=snapshot.manifest,
                transport=self._backend,
                round=part,
            )
            self._waiting.pop(member).offer.set_result(offer)
        return _Round(epoch, snapshot, source.manifest.layout.size_bytes, members)

    def _send(self, current: _Round, pieces: list[np.ndarray]) -> None:
        assert self._rendezvous is not None
        if self._group is None:
            at = (self._rendezvous.host, self._rendezvous.port)
            self._failures += 1
            self._group = Group(self._backend, at, current.epoch, 0, len(current.members) + 1, self._progress_s)
        for _ in self._group.broadcast(pieces):
            self._group_holds = None

    def _broken(self, current: _Round, error: BrokenTransfer) -> None:
        self._close_group()
        self.figures["weights/broken_rounds"] += 1
        log.warning(
            "a broadcast broke off: it is made anew with the rollouts that come back",
            version=current.snapshot.version,
            epoch=current.epoch,
            members=current.members,
            error=str(error),
        )
        self._known -= set(current.members) - current.joined
        if self._failures == MOST_FAILURES:
            self._failures, self._without_route = 0, current.members
            log.warning(
                "no group can be made of these rollouts: each gets a stream of its own", rollouts=current.members
            )

    def _close_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._group_members = None, []

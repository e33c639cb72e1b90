"""The broadcaster: tells the learner which slot to write and the rollouts which snapshot to read.

Rollouts on the learner's host read it in place, and no weights pass through here. Others get it in rounds (rounds.py),
or fetch its buckets one by one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

import numpy as np

from protocol.channel import Reply, Server
from protocol.codec import Message
from protocol.messages import (
    AcquireSlot,
    Bucket,
    Fetch,
    Follow,
    Join,
    Leave,
    Offer,
    Ok,
    Publish,
    Slot,
    Transport,
)
from services.broadcaster.ring import Ring, Snapshot
from services.broadcaster.rounds import Rounds
from services.broadcaster.source import Source
from services.changes import Changes
from services.member import Member
from shared.addresses import advertised, host_of
from shared.config import Weights
from shared.errors import ProtocolError
from shared.log import log

RECHECK_S = 1.0
COLLECTIVE = ("gloo", "nccl")


class Broadcaster:
    """Answers the learner and the rollouts. figures: for the heartbeat."""

    def __init__(self, weights: Weights, host: str = "127.0.0.1", gone: Callable[[], Collection[str]] = tuple) -> None:
        """host: where the members of collective broadcasts find each other.

        gone: the rollouts that the broker has given up. The learner does not wait for them.
        """
        self._gone = gone
        self._ring = Ring(weights.slots, weights.deadline_s)
        self._changes = Changes()
        self._deltas = weights.deltas
        self._source: Source | None = None
        self.rounds = Rounds(
            self._ring,
            self._changes,
            self._read,
            backend="nccl" if weights.transport == "nccl" else "gloo",
            host=host,
            deltas=weights.deltas,
            progress_s=weights.progress_s,
        )
        self.figures = self.rounds.figures
        self.figures |= {"weights/evictions": 0.0, "weights/streamed_mib": 0.0, "weights/saved_mib": 0.0}

    async def handle(self, message: Message) -> Reply:
        """The answer to a request."""
        if message.columns:
            raise ProtocolError("bad_column", f"{message.body.type} carries no columns")
        match message.body:
            case AcquireSlot() as request:
                return await self._acquire(request)
            case Publish() as publish:
                snapshot = Snapshot(publish.slot, publish.lineage, publish.version, publish.manifest)
                self._ring.publish(publish.path, snapshot)
                log.info("snapshot", lineage=publish.lineage, version=publish.version, slot=publish.slot)
                self._changes.notify()
                return Ok()
            case Follow() as follow:
                return await self._follow(follow)
            case Join() as join:
                await self.rounds.join(join)
                return Ok()
            case Fetch() as fetch:
                return await self._fetch(fetch)
            case Leave() as leave:
                self._ring.leave(leave.instance)
                self.rounds.forget(leave.instance)
                self._changes.notify()
                return Ok()
        raise ProtocolError("unknown_type", f"the broadcaster does not answer {message.body.type}")

    async def _acquire(self, request: AcquireSlot) -> Slot:
        slot: int | None = None
        self._ring.use(request.path, is_new=request.is_new)

        def free() -> bool:
            nonlocal slot
            now = time.monotonic()
            if evicted := self._ring.evict(now, self._gone()):
                self.figures["weights/evictions"] += len(evicted)
                log.warning("rollouts kept the learner waiting and lost their snapshots", instances=evicted)
            slot = self._ring.acquire(now)
            return slot is not None

        await self._until(free, request.wait_ms)
        return Slot(slot=slot, held_by=[] if slot is not None else self._ring.blockers())

    async def _follow(self, follow: Follow) -> Offer:
        offer = self._ring.follow(follow.instance, follow.path, follow.slot, follow.lineage, follow.version)
        transport = self._transport(follow)
        if transport in COLLECTIVE:
            self._ring.release(follow.instance)
            self._changes.notify()
            if found := await self.rounds.follow(follow):
                return found
            return Offer(path=None, slot=None, lineage=follow.lineage, version=follow.version, manifest=None)
        self.rounds.forget(follow.instance)

        def newer() -> bool:
            nonlocal offer
            offer = self._ring.offer(follow.instance, follow.lineage, follow.version)
            return offer is not None

        self._changes.notify()  # what the rollout read before may be free now
        if offer is None:
            await self._until(newer, follow.wait_ms)
        if offer is None:
            return Offer(path=None, slot=None, lineage=follow.lineage, version=follow.version, manifest=None)
        return Offer(
            path=self._ring.path,
            slot=offer.slot,
            lineage=offer.lineage,
            version=offer.version,
            manifest=offer.manifest,
            transport=transport,
        )

    def _transport(self, follow: Follow) -> Transport:
        """The first way that a rollout can take, but a stream for its first weights: others need not wait for it."""
        first = follow.transports[0]
        late = follow.version < 0 or not self.rounds.takes(follow.instance)
        return "stream" if first in COLLECTIVE and late and "stream" in follow.transports else first

    async def _fetch(self, fetch: Fetch) -> Reply:
        snapshot = self._ring.offered(fetch.instance, fetch.lineage, fetch.version)
        if snapshot is None:
            raise ProtocolError("unknown_lease", f"version {fetch.version} is not held for {fetch.instance} any more")
        source = await self._read(snapshot)
        if fetch.bucket >= len(source.buckets):
            raise ProtocolError("bad_header", f"there is no bucket {fetch.bucket}")
        base = self._ring.find(fetch.base_lineage, fetch.base_version) if self._deltas else None
        whole = source.buckets[fetch.bucket]
        coded = None if base is None else await asyncio.to_thread(source.delta, base, fetch.bucket)
        data = whole if coded is None else np.frombuffer(coded, "u1")
        self.figures["weights/streamed_mib"] += data.nbytes / 2**20
        self.figures["weights/saved_mib"] += (whole.nbytes - data.nbytes) / 2**20
        return Bucket(is_delta=coded is not None), {"bytes": data}

    async def _read(self, snapshot: Snapshot) -> Source:
        """The bytes of a snapshot of the ring's file."""
        assert self._ring.path is not None
        if self._source is None or (self._source.path, self._source.snapshot) != (self._ring.path, snapshot):
            self._source = await asyncio.to_thread(Source, self._ring.path, snapshot, self._source)
        return self._source

    async def _until(self, condition: Callable[[], bool], wait_ms: int) -> None:
        """Wait until a condition holds, looking again every second because deadlines pass without an event."""
        end = time.monotonic() + wait_ms / 1000
        while not await self._changes.until(condition, min(wait_ms / 1000, RECHECK_S)) and time.monotonic() < end:
            pass


async def serve(broker: str, instance: str) -> None:
    """Run the broadcaster until the run ends."""
    member = Member(broker, "broadcaster", instance)
    config = await member.join()
    bind = f"tcp://{host_of(config.broker.bind)}:0"
    broadcaster = Broadcaster(config.weights, host_of(advertised(bind)), lambda: member.gone)
    server = Server.again(member.listened, bind, broadcaster.handle)
    member.figures = broadcaster.figures
    await member.join(advertised(server.address))
    member.state = "SERVING"
    await member.run(server.run, broadcaster.rounds.run)

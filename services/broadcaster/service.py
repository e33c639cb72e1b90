"""The broadcaster: tells the learner which slot to write and the rollouts which snapshot to read. No weights here."""

from __future__ import annotations

import time
from collections.abc import Callable

from protocol.channel import Reply, Server
from protocol.codec import Message
from protocol.messages import AcquireSlot, Follow, Leave, Offer, Ok, Publish, Slot
from services.broadcaster.ring import Ring, Snapshot
from services.changes import Changes
from services.member import Member
from shared.config import Weights
from shared.errors import ProtocolError
from shared.log import log

RECHECK_S = 1.0


class Broadcaster:
    """Answers the learner and the rollouts. figures: for the heartbeat."""

    def __init__(self, weights: Weights) -> None:
        self._ring = Ring(weights.slots, weights.deadline_s)
        self._changes = Changes()
        self.figures: dict[str, float] = {"weights/evictions": 0.0}

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
            case Leave() as leave:
                self._ring.leave(leave.instance)
                self._changes.notify()
                return Ok()
        raise ProtocolError("unknown_type", f"the broadcaster does not answer {message.body.type}")

    async def _acquire(self, request: AcquireSlot) -> Slot:
        slot: int | None = None
        self._ring.use(request.path, is_new=request.is_new)

        def free() -> bool:
            nonlocal slot
            now = time.monotonic()
            if evicted := self._ring.evict(now):
                self.figures["weights/evictions"] += len(evicted)
                log.warning("rollouts kept the learner waiting and lost their snapshots", instances=evicted)
            slot = self._ring.acquire(now)
            return slot is not None

        await self._until(free, request.wait_ms)
        return Slot(slot=slot, held_by=[] if slot is not None else self._ring.blockers())

    async def _follow(self, follow: Follow) -> Offer:
        offer = self._ring.follow(follow.instance, follow.path, follow.slot, follow.lineage, follow.version)

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
            path=self._ring.path, slot=offer.slot, lineage=offer.lineage, version=offer.version, manifest=offer.manifest
        )

    async def _until(self, condition: Callable[[], bool], wait_ms: int) -> None:
        """Wait until a condition holds, looking again every second because deadlines pass without an event."""
        end = time.monotonic() + wait_ms / 1000
        while not await self._changes.until(condition, min(wait_ms / 1000, RECHECK_S)) and time.monotonic() < end:
            pass


async def serve(broker: str, instance: str) -> None:
    """Run the broadcaster until the run ends."""
    member = Member(broker, "broadcaster", instance)
    config = await member.join()
    broadcaster = Broadcaster(config.weights)
    host = config.broker.bind.rpartition(":")[0]
    server = Server.again(member.listened, f"{host}:0", broadcaster.handle)
    member.figures = broadcaster.figures
    await member.join(server.address)
    member.state = "SERVING"
    await member.run(server.run)

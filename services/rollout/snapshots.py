"""Takes each new snapshot of the learner's weights, in place or over the network, whichever way there is."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from protocol.channel import Client
from protocol.keys import find_keys
from protocol.messages import Follow, Leave, Offer, Ok, Transport
from services.rollout.receiver import Receiver
from shared.config import Weights
from shared.errors import ProtocolError, Unreachable, WeightsError
from shared.log import log
from shared.snapshot import Manifest, SnapshotFile, is_here

LONG_POLL_S = 20.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot in this host's shared memory, its checksums right. is_shared: in the learner's own file."""

    lineage: int
    version: int
    file: SnapshotFile
    slot: int
    manifest: Manifest
    is_shared: bool


class Snapshots:
    """Follows the broadcaster for one rollout.

    in_use: set by the caller once it computes with a snapshot, and reads no older one any more. figures: what the last
    snapshot cost until it was here.
    """

    def __init__(self, broadcaster: str, instance: str, weights: Weights, *, patience_s: float) -> None:
        self._client = Client(broadcaster, peer="broadcaster")
        self._instance = instance
        self._transport = weights.transport
        self._deadline_s = weights.deadline_s
        self._patience_s = patience_s
        self._is_local = True
        self._receiver = Receiver(self._client, instance, progress_s=weights.progress_s, patience_s=patience_s)
        self.in_use: Snapshot | None = None
        self.figures: dict[str, float] = {}

    async def next(self) -> Snapshot | None:
        """A newer snapshot than that in use; None where there is none after a while, or it did not arrive.

        Raises WeightsError where a snapshot is damaged.
        """
        held = self.in_use
        in_place = held if held is not None and held.is_shared else None
        request = Follow(
            instance=self._instance,
            path=None if in_place is None else in_place.file.path.name,
            slot=None if in_place is None else in_place.slot,
            lineage=0 if held is None else held.lineage,
            version=-1 if held is None else held.version,
            wait_ms=int(LONG_POLL_S * 1000),
            transports=self.transports(),
        )
        offer, _ = await self._client.request(request, Offer, wait_s=LONG_POLL_S, deadline_s=self._patience_s)
        if offer.slot is None or offer.path is None or offer.manifest is None:
            return None
        if self._transport == "auto":
            self._is_local = is_here(offer.path)
        manifest = Manifest.from_wire(offer.manifest)
        if offer.transport != "shm":
            found = await self._receiver.receive(offer, manifest)
            self.figures = self._receiver.figures
        elif self._is_local:
            found = await self._open(offer.path, offer.slot, manifest)
        else:
            log.info("the learner's shared memory is not here: snapshots are received", transports=self.transports())
            found = None
        if found is None:
            return None
        return Snapshot(offer.lineage, offer.version, *found, manifest, offer.transport == "shm")

    def transports(self) -> list[Transport]:
        """The ways that this rollout can take a snapshot, the best one first."""
        match self._transport:
            case "auto":
                return ["shm"] if self._is_local else ["stream"] if find_keys() else ["gloo", "stream"]
            case "gloo" | "nccl" as collective:
                return [collective, "stream"]
            case transport:
                return [transport]

    async def _open(self, name: str, slot: int, manifest: Manifest) -> tuple[SnapshotFile, int]:
        start, file = time.perf_counter(), self.in_use.file if self.in_use else None
        if file is None or file.path.name != name:
            file = SnapshotFile.attach(name, manifest.layout)
        await asyncio.to_thread(file.verify, slot, manifest)
        self.figures = {"weights/verify_s": time.perf_counter() - start}
        return file, slot

    def check(self) -> None:
        """Raises WeightsError where the snapshot in use was taken away, and what was generated with it is void."""
        held = self.in_use
        if held is not None and not held.file.holds(held.slot, held.lineage, held.version):
            raise WeightsError(
                f"the snapshot of version {held.version} was overwritten while {self._instance} still used it: it did "
                f"not follow within {self._deadline_s:g} s (weights.deadline_s)"
            )

    async def leave(self) -> None:
        """Tell the broadcaster that nothing is read any more."""
        try:
            await self._client.request(Leave(instance=self._instance), Ok, deadline_s=2.0)
        except (Unreachable, ProtocolError) as trouble:
            log.warning("could not tell the broadcaster that this rollout leaves", error=str(trouble))
        await self.close()

    async def close(self) -> None:
        """Let go of everything, without a word."""
        self._receiver.close()
        await self._client.close()

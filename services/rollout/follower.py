"""The rollout's end of the weight path: takes each new snapshot, swaps it into the engine, and proves it right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from protocol.channel import Client
from protocol.keys import find_keys
from protocol.messages import Follow, Leave, Offer, Ok, Transport
from services.changes import Changes
from services.rollout.engine import Engine, Slot, Weights
from services.rollout.receiver import Receiver
from shared.config import RunConfig
from shared.errors import ProtocolError, Unreachable, WeightsError
from shared.log import log
from shared.snapshot import Manifest, SnapshotFile, is_here

LONG_POLL_S = 20.0
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest |engine − learner| log-prob of a probe token that is taken for rounding, by dtype.

With the same kernels and number of threads on both sides it is 0; with others 0.1 was seen in bfloat16.
"""


class Follower:
    """Keeps an engine at the newest weights. figures: what the last swap cost, for the heartbeat."""

    def __init__(
        self,
        broadcaster: str,
        engine: Engine,
        config: RunConfig,
        instance: str,
        *,
        on_version: Callable[[int], None],
    ) -> None:
        """on_version is told each version once the engine is proven to hold it."""
        self._client = Client(broadcaster, peer="broadcaster")
        self._instance = instance
        self._transport = config.weights.transport
        self._is_local = True
        self._receiver = Receiver(
            self._client,
            instance,
            progress_s=config.weights.progress_s,
            patience_s=config.broker.patience_s,
        )
        self._engine = engine
        self._on_version = on_version
        self._patience_s = config.broker.patience_s
        self._tolerance = config.weights.tolerance or TOLERANCE[config.rollout.dtype]
        self._is_shared = False
        self._file: SnapshotFile | None = None
        self._slot: int | None = None
        self._lineage, self._version = 0, -1
        self._proofs = Changes()
        self._proving: int | None = None
        self._failed_proofs = 0
        self.figures: dict[str, float] = {}

    async def run(self) -> None:
        """Follow until cancelled. Raises WeightsError where a snapshot cannot be loaded as it is meant."""
        try:
            while True:
                await self.follow()
        finally:
            await self._leave()

    async def first(self) -> None:
        """Wait for the first weights."""
        while self._version < 0:
            await self.follow()

    async def follow(self) -> None:
        """Take the newest snapshot once there is a newer one; return without it after a while."""
        request = Follow(
            instance=self._instance,
            path=self._file.path.name if self._file is not None and self._is_shared else None,
            slot=self._slot if self._is_shared else None,
            lineage=self._lineage,
            version=self._version,
            wait_ms=int(LONG_POLL_S * 1000),
            transports=self._transports(),
        )
        offer, _ = await self._client.request(request, Offer, wait_s=LONG_POLL_S, deadline_s=self._patience_s)
        if offer.slot is None or offer.path is None or offer.manifest is None:
            return
        manifest = Manifest.from_wire(offer.manifest)
        if self._transport == "auto":
            self._is_local = is_here(offer.path)
        is_shared = offer.transport == "shm"
        if not is_shared:
            received = await self._receiver.receive(offer, manifest)
            if received is None:
                return
            file, slot = received
        elif self._is_local:
            file, slot = self._attached(offer.path, manifest), offer.slot
        else:
            log.info("the learner's shared memory is not here: snapshots are received", transports=self._transports())
            return
        await self._load(file, offer, slot, manifest)
        self._is_shared, self._file, self._slot = is_shared, file, slot
        self._lineage, self._version = offer.lineage, offer.version
        self._on_version(offer.version)

    def _attached(self, name: str, manifest: Manifest) -> SnapshotFile:
        if self._file is not None and self._file.path.name == name:
            return self._file
        return SnapshotFile.attach(name, manifest.layout)

    def _transports(self) -> list[Transport]:
        """The ways that this rollout can take a snapshot, the best one first."""
        match self._transport:
            case "auto":
                return ["shm"] if self._is_local else ["stream"] if find_keys() else ["gloo", "stream"]
            case "gloo" | "nccl" as collective:
                return [collective, "stream"]
            case transport:
                return [transport]

    async def _load(self, file: SnapshotFile, offer: Offer, slot: int, manifest: Manifest) -> None:
        """Swap and probe; once more where the probe fails."""
        for attempt in (1, 2):
            start = time.perf_counter()
            if offer.transport == "shm":  # what is received was verified as it came
                await asyncio.to_thread(file.verify, slot, manifest)
            verified = time.perf_counter()
            place = Slot(file.path.name, slot, file.layout)
            weights = Weights(offer.lineage, offer.version, file.tensors(slot), place)
            self._proving = offer.version
            # Queued together: nothing, or next to nothing, is generated between swap and proof. See `proven`.
            pause_s, logprobs = await asyncio.gather(
                self._engine.swap(weights), self._engine.score(manifest.probe_tokens)
            )
            proven = time.perf_counter()
            error = float(np.abs(logprobs - np.asarray(manifest.probe_logprobs)).max())
            self.figures = {
                "weights/verify_s": verified - start,
                "weights/pause_s": pause_s,
                "weights/proof_s": proven - verified,
                "weights/probe_error": error,
                "weights/version": float(offer.version),
                **self._receiver.figures,
            }
            log.info("weights", lineage=offer.lineage, version=offer.version, attempt=attempt, **self.figures)
            if error <= self._tolerance:
                self._proving = None
                self._proofs.notify()
                return
            self._failed_proofs += 1
        raise WeightsError(
            f"the engine's log-probs of the probe are off by {error:.3g} at version {offer.version} (allowed: "
            f"{self._tolerance:g}), also after a second load: it does not compute with the learner's weights"
        )

    async def proven(self, versions: set[int]) -> None:
        """Wait until the weights of these versions, which samples ended with, are proven.

        Raises WeightsError where they had to be loaded a second time. Where that does not help `run` raises, and the
        service ends.
        """
        before = self._failed_proofs
        await self._proofs.until(lambda: self._proving not in versions, None)
        if self._failed_proofs != before:
            raise WeightsError("these samples were made with weights that were wrong: they are made anew")

    def check_slot(self) -> None:
        """Raises WeightsError where the slot in use was taken away, and what was generated with it is void."""
        if self._file is None or self._slot is None or self._file.holds(self._slot, self._lineage, self._version):
            return
        raise WeightsError(
            f"the snapshot of version {self._version} was overwritten while {self._instance} still used it: it did not "
            "follow in time (weights.deadline_s)"
        )

    async def _leave(self) -> None:
        try:
            await self._client.request(Leave(instance=self._instance), Ok, deadline_s=2.0)
        except (Unreachable, ProtocolError) as trouble:
            log.warning("could not tell the broadcaster that this rollout leaves", error=str(trouble))
        self._receiver.close()
        await self._client.close()

"""The rollout's end of the weight path: takes each new snapshot, swaps it into the engine, and proves it right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from protocol.channel import Client
from protocol.messages import Follow, Leave, Offer, Ok
from services.changes import Changes
from services.rollout.engine import Engine, Slot, Weights
from services.rollout.probe import LARGEST, TOLERANCE, ProbeError
from shared.config import RunConfig
from shared.errors import ProtocolError, Unreachable, WeightsError
from shared.log import log
from shared.snapshot import Manifest, SnapshotFile

LONG_POLL_S = 20.0


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
        self._engine = engine
        self._on_version = on_version
        self._patience_s = config.broker.patience_s
        self._tolerance = config.weights.tolerance or TOLERANCE[config.rollout.dtype]
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
            path=None if self._file is None else self._file.path.name,
            slot=self._slot,
            lineage=self._lineage,
            version=self._version,
            wait_ms=int(LONG_POLL_S * 1000),
        )
        offer, _ = await self._client.request(request, Offer, wait_s=LONG_POLL_S, deadline_s=self._patience_s)
        if offer.slot is None or offer.path is None or offer.manifest is None:
            return
        manifest = Manifest.from_wire(offer.manifest)
        if self._file is None or self._file.path.name != offer.path:
            self._file = SnapshotFile.attach(offer.path, manifest.layout)
        await self._load(self._file, offer, offer.slot, manifest)
        self._slot, self._lineage, self._version = offer.slot, offer.lineage, offer.version
        self._on_version(offer.version)

    async def _load(self, file: SnapshotFile, offer: Offer, slot: int, manifest: Manifest) -> None:
        """Verify, swap and probe; once more where the probe fails."""
        for attempt in (1, 2):
            start = time.perf_counter()
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
            error = ProbeError.between(logprobs, manifest.probe_logprobs)
            self.figures = {
                "weights/verify_s": verified - start,
                "weights/pause_s": pause_s,
                "weights/proof_s": proven - verified,
                "weights/probe_error": error.largest,
                "weights/probe_mean": error.mean,
                "weights/version": float(offer.version),
            }
            log.info("weights", lineage=offer.lineage, version=offer.version, attempt=attempt, **self.figures)
            if error.within(self._tolerance):
                self._proving = None
                self._proofs.notify()
                return
            self._failed_proofs += 1
        raise WeightsError(
            f"the engine's log-probs of the probe are off by {error.mean:.3g} on average and {error.largest:.3g} at "
            f"most at version {offer.version} (allowed: {self._tolerance:g} and {LARGEST * self._tolerance:g}), also "
            "after a second load: it does not compute with the learner's weights"
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
        await self._client.close()

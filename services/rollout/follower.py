"""Keeps an engine at the newest weights: swaps each new snapshot in, and proves that the engine computes with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.changes import Changes
from services.rollout.engine import Engine, Slot, Weights
from services.rollout.probe import LARGEST, TOLERANCE, ProbeError
from services.rollout.snapshots import Snapshot, Snapshots
from shared.config import RunConfig
from shared.errors import WeightsError
from shared.log import log


class Follower:
    """One engine and the snapshots it takes. figures: what the last version cost, for the heartbeat."""

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
        self.snapshots = Snapshots(broadcaster, instance, config.weights, patience_s=config.broker.patience_s)
        self._engine = engine
        self._on_version = on_version
        self._tolerance = config.weights.tolerance or TOLERANCE[config.rollout.dtype]
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
            await self.snapshots.leave()

    async def first(self) -> None:
        """Wait for the first weights."""
        while not await self.follow():
            pass

    async def follow(self) -> bool:
        """Use the newest snapshot once there is a newer one; returns whether there was one, after a while."""
        snapshot = await self.snapshots.next()
        if snapshot is None:
            return False
        await self._load(snapshot)
        self.snapshots.in_use = snapshot
        self._on_version(snapshot.version)
        return True

    async def _load(self, snapshot: Snapshot) -> None:
        """Swap and probe; once more where the probe fails."""
        manifest, version = snapshot.manifest, snapshot.version
        place = Slot(snapshot.file.path.name, snapshot.slot, snapshot.file.layout)
        weights = Weights(snapshot.lineage, version, snapshot.file.tensors(snapshot.slot), place)
        for attempt in (1, 2):
            start = time.perf_counter()
            self._proving = version
            # Queued together: nothing, or next to nothing, is generated between swap and proof. See `proven`.
            pause_s, logprobs = await asyncio.gather(
                self._engine.swap(weights), self._engine.score(manifest.probe_tokens)
            )
            error = ProbeError.between(logprobs, manifest.probe_logprobs)
            self.figures = self.snapshots.figures | {
                "weights/pause_s": pause_s,
                "weights/proof_s": time.perf_counter() - start,
                "weights/probe_error": error.largest,
                "weights/probe_mean": error.mean,
                "weights/version": float(version),
            }
            log.info("weights", lineage=snapshot.lineage, version=version, attempt=attempt, **self.figures)
            if error.within(self._tolerance):
                self._proving = None
                self._proofs.notify()
                return
            self._failed_proofs += 1
        raise WeightsError(
            f"the engine's log-probs of the probe are off by {error.mean:.3g} on average and {error.largest:.3g} at "
            f"most at version {version} (allowed: {self._tolerance:g} and {LARGEST * self._tolerance:g}), also "
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

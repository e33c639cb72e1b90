"""Publishes the weights that a learner trains: writes them into a slot, and proves there what they compute."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from services.compute.backend import Backend
from services.learner.slots import Slots
from shared.config import RunConfig
from shared.snapshot import Layout, Manifest


class Publisher:
    """Publishes the weights of a backend. figures: what the last version cost, by metric name."""

    def __init__(self, broadcaster: str, run_id: str, backend: Backend, config: RunConfig) -> None:
        layout = Layout.of(backend.shapes, config.rollout.dtype)
        self.slots = Slots(broadcaster, run_id, layout, config.weights, patience_s=config.broker.patience_s)
        self._backend = backend
        self._probe = backend.probe_tokens(config.weights.probe_tokens)
        self._manifest: Manifest | None = None
        self.figures: dict[str, float] = {}

    @property
    def is_forgotten(self) -> bool:
        """As of Slots."""
        return self.slots.is_forgotten

    async def acquire(self, lineage: int, version: int) -> Mapping[str, torch.Tensor]:
        """As of Slots."""
        return await self.slots.acquire(lineage, version)

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the weights into the slot, compute with them from now on, make the manifest. In the trainer thread."""
        start = time.perf_counter()
        self._backend.write_snapshot(tensors)
        self._backend.use_snapshot(tensors)
        copied = time.perf_counter()
        logprobs = self._backend.score(self._probe)
        scored = time.perf_counter()
        self._manifest = self.slots.manifest(self._probe, logprobs.tolist())
        self.figures = {
            "time/snapshot_s": copied - start,
            "time/probe_s": scored - copied,
            "time/checksum_s": time.perf_counter() - scored,
        }

    async def publish(self, lineage: int, version: int) -> bool:
        """Offer what was written as the newest weights; False where it must be written anew, to another slot."""
        assert self._manifest is not None
        return await self.slots.publish(lineage, version, self._manifest)

    async def close(self) -> None:
        """As of Slots."""
        await self.slots.close()

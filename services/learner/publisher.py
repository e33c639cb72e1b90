"""The learner's end of the weight path: writes a snapshot into shared memory and offers it through the broadcaster."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

import torch

from protocol.channel import Client
from protocol.messages import AcquireSlot, Ok, Publish, Slot
from services.learner.backend import Backend
from shared.config import RunConfig
from shared.errors import WeightsError
from shared.snapshot import PREFIX, Layout, Manifest, SnapshotFile

LONG_POLL_S = 5.0


class Publisher:
    """Publishes the weights of a backend. figures: what the last version cost, by metric name."""

    def __init__(self, broadcaster: str, run_id: str, backend: Backend, config: RunConfig) -> None:
        shapes = {name: tuple(master.shape) for name, master in backend.parameters.items()}
        layout = Layout.of(shapes, config.rollout.dtype)
        name = f"{PREFIX}{run_id}-{secrets.token_hex(4)}"  # another one after a restart: rollouts see that it is new
        self._file = SnapshotFile.create(name, layout, config.weights.slots)
        self._client = Client(broadcaster, peer="broadcaster")
        self._backend = backend
        self._weights = config.weights
        self._probe = backend.probe_tokens(config.weights.probe_tokens)
        self._slot = -1
        self._manifest: Manifest | None = None
        self.figures: dict[str, float] = {}

    async def acquire(self, lineage: int, version: int) -> Mapping[str, torch.Tensor]:
        """The tensors of a slot that may be written; waits for readers to let go of one.

        Raises WeightsError, naming who reads them, where none becomes free.
        """
        end = time.monotonic() + 2 * self._weights.deadline_s
        while True:
            request = AcquireSlot(lineage=lineage, version=version, wait_ms=int(LONG_POLL_S * 1000))
            answer, _ = await self._client.request(request, Slot, wait_s=LONG_POLL_S)
            if answer.slot is not None:
                self._slot = answer.slot
                self._file.begin(self._slot)
                return self._file.tensors(self._slot)
            if time.monotonic() > end:
                raise WeightsError(
                    f"no snapshot slot became free in {2 * self._weights.deadline_s:.0f} s; they are read by "
                    f"{', '.join(answer.held_by) or 'nobody known'}"
                )

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the weights into the slot, compute with them from now on, make the manifest. In the trainer thread."""
        start = time.perf_counter()
        self._backend.write_snapshot(tensors)
        self._backend.use_snapshot(tensors)
        copied = time.perf_counter()
        bucket_bytes = self._weights.bucket_mib << 20
        checksums = self._file.checksums(self._slot, bucket_bytes)
        summed = time.perf_counter()
        logprobs = self._backend.score(self._probe)
        self._manifest = Manifest(self._file.layout, bucket_bytes, checksums, self._probe, logprobs.tolist())
        self.figures = {
            "time/snapshot_s": copied - start,
            "time/checksum_s": summed - copied,
            "time/probe_s": time.perf_counter() - summed,
        }

    async def publish(self, lineage: int, version: int) -> None:
        """Offer what was written as the newest weights."""
        assert self._manifest is not None
        self._file.seal(self._slot, lineage, version)
        request = Publish(
            path=self._file.path.name,
            slot=self._slot,
            lineage=lineage,
            version=version,
            manifest=self._manifest.to_wire(),
        )
        await self._client.request(request, Ok)

    async def close(self) -> None:
        """Remove the snapshots; rollouts that read one keep it until they are done."""
        self._file.unlink()
        await self._client.close()

"""The learner's end of the weight path: writes a snapshot into shared memory and offers it through the broadcaster."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping

import torch

from protocol.channel import Client
from protocol.messages import AcquireSlot, Ok, Publish, Slot
from services.learner.backend import Backend
from shared.config import RunConfig
from shared.errors import ProtocolError, WeightsError
from shared.log import log
from shared.snapshot import PREFIX, Layout, Manifest, SnapshotFile

LONG_POLL_S = 5.0


class Publisher:
    """Publishes the weights of a backend. figures: what the last version cost, by metric name.

    A broadcaster that was started again does not know who reads what: everything goes to a new file then.
    """

    def __init__(self, broadcaster: str, run_id: str, backend: Backend, config: RunConfig) -> None:
        shapes = {name: tuple(master.shape) for name, master in backend.parameters.items()}
        self._layout = Layout.of(shapes, config.rollout.dtype)
        self._run_id = run_id
        self._weights = config.weights
        self._file = self._new_file()
        self._client = Client(broadcaster, peer="broadcaster")
        self._patience_s = config.broker.patience_s
        self._backend = backend
        self._probe = backend.probe_tokens(config.weights.probe_tokens)
        self._slot = -1
        self._published_to: str | None = None
        self._connections = 0
        self._manifest: Manifest | None = None
        self.figures: dict[str, float] = {}

    def _new_file(self) -> SnapshotFile:
        name = f"{PREFIX}{self._run_id}-{secrets.token_hex(4)}"  # rollouts see that it is another
        return SnapshotFile.create(name, self._layout, self._weights.slots)

    @property
    def is_forgotten(self) -> bool:
        """Whether the broadcaster may be another one than that of the last snapshot, which it does not know then."""
        return self._client.connections != self._connections

    async def acquire(self, lineage: int, version: int) -> Mapping[str, torch.Tensor]:
        """The tensors of a slot that may be written; waits for readers to let go of one.

        Raises WeightsError, naming who reads them, where none becomes free.
        """
        end = time.monotonic() + 2 * self._weights.deadline_s
        while True:
            try:
                answer = await self._ask_for_slot(lineage, version)
            except ProtocolError as refusal:
                if refusal.code != "unknown_lease":
                    raise
                log.warning("the broadcaster is another one: snapshots go to a new file")
                self._file.unlink()
                self._file = await asyncio.to_thread(self._new_file)
                continue
            if answer.slot is not None:
                self._slot = answer.slot
                self._file.begin(self._slot)
                return self._file.tensors(self._slot)
            if time.monotonic() > end:
                raise WeightsError(
                    f"no snapshot slot became free in {2 * self._weights.deadline_s:.0f} s; they are read by "
                    f"{', '.join(answer.held_by) or 'nobody known'}"
                )

    async def _ask_for_slot(self, lineage: int, version: int) -> Slot:
        name = self._file.path.name
        request = AcquireSlot(
            path=name,
            is_new=name != self._published_to,
            lineage=lineage,
            version=version,
            wait_ms=int(LONG_POLL_S * 1000),
        )
        answer, _ = await self._client.request(request, Slot, wait_s=LONG_POLL_S, deadline_s=self._patience_s)
        return answer

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

    async def publish(self, lineage: int, version: int) -> bool:
        """Offer what was written as the newest weights; False where it must be written anew, to another slot."""
        assert self._manifest is not None
        self._file.seal(self._slot, lineage, version)
        self._published_to = self._file.path.name
        request = Publish(
            path=self._published_to,
            slot=self._slot,
            lineage=lineage,
            version=version,
            manifest=self._manifest.to_wire(),
        )
        try:
            await self._client.request(request, Ok, deadline_s=self._patience_s)
        except ProtocolError as refusal:
            if refusal.code != "unknown_lease":
                raise
            return False
        self._connections = self._client.connections
        return True

    async def close(self) -> None:
        """Remove the snapshots; rollouts that read one keep it until they are done."""
        self._file.unlink()
        await self._client.close()

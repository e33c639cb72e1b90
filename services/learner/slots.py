"""The learner's snapshot slots in shared memory: acquired from the broadcaster, written, and published through it."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from protocol.channel import Client
from protocol.messages import AcquireSlot, Ok, Publish, Slot
from shared.config import Weights
from shared.errors import ProtocolError, WeightsError
from shared.log import log
from shared.snapshot import PREFIX, Layout, Manifest, SnapshotFile

if TYPE_CHECKING:
    import torch

LONG_POLL_S = 5.0


class Slots:
    """The slots that one learner writes in turn.

    A broadcaster that was started again does not know who reads what: everything goes to a new file then.
    """

    def __init__(self, broadcaster: str, run_id: str, layout: Layout, weights: Weights, *, patience_s: float) -> None:
        self.layout = layout
        self._run_id = run_id
        self._weights = weights
        self._patience_s = patience_s
        self.file = self._new_file()
        self._client = Client(broadcaster, peer="broadcaster")
        self._slot = -1
        self._published_to: str | None = None
        self._connections = 0

    def _new_file(self) -> SnapshotFile:
        name = f"{PREFIX}{self._run_id}-{secrets.token_hex(4)}"  # rollouts see that it is another
        return SnapshotFile.create(name, self.layout, self._weights.slots)

    @property
    def is_forgotten(self) -> bool:
        """Whether the broadcaster may be another one than that of the last snapshot, which it does not know then."""
        return self._client.connections != self._connections

    async def acquire(self, lineage: int, version: int) -> dict[str, torch.Tensor]:
        """The tensors of a slot that may be written; waits for readers to let go of one.

        Raises WeightsError, naming who reads them, where none becomes free.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + 2 * self._weights.deadline_s
        while True:
            try:
                answer = await self._ask(lineage, version)
            except ProtocolError as refusal:
                if refusal.code != "unknown_lease":
                    raise
                log.warning("the broadcaster is another one: snapshots go to a new file")
                self.file.unlink()
                self.file = await asyncio.to_thread(self._new_file)
                continue
            if answer.slot is not None:
                self._slot = answer.slot
                self.file.begin(self._slot)
                return self.file.tensors(self._slot)
            if loop.time() > end:
                raise WeightsError(
                    f"no snapshot slot became free in {2 * self._weights.deadline_s:.0f} s; they are read by "
                    f"{', '.join(answer.held_by) or 'nobody known'}"
                )

    async def _ask(self, lineage: int, version: int) -> Slot:
        name = self.file.path.name
        request = AcquireSlot(
            path=name,
            is_new=name != self._published_to,
            lineage=lineage,
            version=version,
            wait_ms=int(LONG_POLL_S * 1000),
        )
        answer, _ = await self._client.request(request, Slot, wait_s=LONG_POLL_S, deadline_s=self._patience_s)
        return answer

    def manifest(self, probe_tokens: list[int], probe_logprobs: list[float]) -> Manifest:
        """What readers need to trust the slot, now that it is written. Reads all of it."""
        bucket_bytes = self._weights.bucket_mib << 20
        checksums = self.file.checksums(self._slot, bucket_bytes)
        return Manifest(self.layout, bucket_bytes, checksums, probe_tokens, probe_logprobs)

    async def publish(self, lineage: int, version: int, manifest: Manifest) -> bool:
        """Offer the slot as the newest weights; False where it must be written anew, to another slot."""
        self.file.seal(self._slot, lineage, version)
        self._published_to = self.file.path.name
        request = Publish(
            path=self._published_to, slot=self._slot, lineage=lineage, version=version, manifest=manifest.to_wire()
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
        self.file.unlink()
        await self._client.close()

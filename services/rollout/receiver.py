"""Snapshots from another host: received into shared memory of this process's own, where the engine finds them."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import numpy as np

from protocol.channel import Client
from protocol.messages import Bucket, Fetch, Join, Offer, Ok, Round
from shared import delta
from shared.addresses import host_of
from shared.collective import Backend, Group
from shared.errors import BrokenTransfer, ProtocolError, StrettoError, WeightsError
from shared.log import log
from shared.snapshot import PREFIX, Manifest, SnapshotFile, checksum

SLOTS = 2
"""The engine's, and the one that is received."""
FETCHES = 4
"""Buckets of a stream that are asked for at once."""
MOST_FAILURES = 5


class Receiver:
    """One rollout's end of the transports that copy. figures: what the last snapshot cost."""

    def __init__(self, client: Client, instance: str, *, progress_s: float, patience_s: float) -> None:
        self._client = client
        self._instance = instance
        self._progress_s = progress_s
        self._patience_s = patience_s
        self._host = host_of(client.address)
        self._file: SnapshotFile | None = None
        self._slot = 0
        self._held = (0, -1)
        self._group: Group | None = None
        self._failures = 0
        self.figures: dict[str, float] = {}

    async def receive(self, offer: Offer, manifest: Manifest) -> tuple[SnapshotFile, int] | None:
        """The file and slot that an offered snapshot lies in now, its checksums right; None: it must be asked for anew.

        Raises WeightsError where several in a row arrived damaged.
        """
        if self._file is None or self._file.layout != manifest.layout:
            self._file = await asyncio.to_thread(self._new_file, manifest)
            self._held = (0, -1)
        file, slot = self._file, (self._slot + 1) % SLOTS
        buckets = file.buckets(slot, manifest.bucket_bytes)
        file.begin(slot)
        start = asyncio.get_running_loop().time()
        try:
            if offer.round is None:
                received = await self._stream(offer, manifest, buckets)
            else:
                received = await self._take_part(offer, offer.round, manifest, buckets)
        except BrokenTransfer as error:
            log.warning("a broadcast broke off", version=offer.version, error=str(error))
            return None
        except WeightsError as error:
            self._failures += 1
            log.warning("weights arrived damaged", version=offer.version, transport=offer.transport, error=str(error))
            if self._failures == MOST_FAILURES:
                raise
            return None
        except ProtocolError as refusal:
            if refusal.code not in ("unknown_lease", "aborted"):
                raise
            log.info("weights are not sent any more", version=offer.version, reason=refusal.detail)
            return None
        file.seal(slot, offer.lineage, offer.version)
        self._slot, self._held, self._failures = slot, (offer.lineage, offer.version), 0
        self.figures = {
            "weights/receive_s": asyncio.get_running_loop().time() - start,
            "weights/received_mib": received / 2**20,
        }
        return file, slot

    def _new_file(self, manifest: Manifest) -> SnapshotFile:
        return SnapshotFile.create(f"{PREFIX}{secrets.token_hex(8)}", manifest.layout, SLOTS)

    async def _stream(self, offer: Offer, manifest: Manifest, buckets: list[np.ndarray]) -> int:
        """Fetch bucket by bucket; returns the bytes that came.

        After a failure those under way still come to their end: nothing writes to the slot when it is written anew.
        """
        turns = asyncio.Semaphore(FETCHES)
        failures: list[StrettoError] = []

        async def fetch(number: int) -> int:
            async with turns:
                if failures:
                    return 0
                base_lineage, base_version = self._held
                request = Fetch(
                    instance=self._instance,
                    lineage=offer.lineage,
                    version=offer.version,
                    bucket=number,
                    base_lineage=base_lineage,
                    base_version=base_version,
                )
                try:
                    answer, columns = await self._client.request(request, Bucket, deadline_s=self._patience_s)
                    data = columns["bytes"]
                    await asyncio.to_thread(self._put, data, answer.is_delta, number, manifest, buckets)
                except StrettoError as error:
                    failures.append(error)
                    return 0
                return data.nbytes

        received = await asyncio.gather(*(fetch(number) for number in range(len(buckets))))
        if failures:
            raise failures[0]
        return sum(received)

    async def _take_part(self, offer: Offer, part: Round, manifest: Manifest, buckets: list[np.ndarray]) -> int:
        """Join a round and receive what it brings; returns the bytes that came."""
        if part.delta_bytes is not None and len(part.delta_bytes) != len(buckets):
            raise ProtocolError("bad_header", "a round brings a delta of each bucket")
        request = Join(
            instance=self._instance,
            epoch=part.epoch,
            lineage=offer.lineage,
            version=offer.version,
            size_bytes=manifest.layout.size_bytes,
        )
        await self._client.request(request, Ok, wait_s=self._progress_s, deadline_s=self._patience_s)
        backend: Any = offer.transport
        return await asyncio.to_thread(self._broadcast, backend, part, manifest, buckets)

    def _broadcast(self, backend: Backend, part: Round, manifest: Manifest, buckets: list[np.ndarray]) -> int:
        try:
            if self._group is None or self._group.epoch != part.epoch:
                self.leave_group()
                at = (self._host, part.port)
                self._group = Group(backend, at, part.epoch, part.rank, part.size, self._progress_s)
            if part.delta_bytes is None:
                for number, bucket in enumerate(self._group.broadcast(buckets)):
                    _check(bucket, number, manifest)
                return sum(bucket.nbytes for bucket in buckets)
            deltas = [np.empty(size, "u1") for size in part.delta_bytes]
            for number, coded in enumerate(self._group.broadcast(deltas)):
                self._put(coded, True, number, manifest, buckets)
            return sum(part.delta_bytes)
        except WeightsError:
            self.leave_group()
            raise

    def _put(
        self, data: np.ndarray, is_delta: bool, number: int, manifest: Manifest, buckets: list[np.ndarray]
    ) -> None:
        """Write what came for a bucket to its place. Raises WeightsError where it is damaged."""
        bucket = buckets[number]
        try:
            if is_delta:
                assert self._file is not None
                bucket[:] = self._file.buckets(self._slot, manifest.bucket_bytes)[number]
                delta.apply(data.data, bucket, manifest.layout.item_bytes)
            else:
                bucket[:] = data
        except ValueError as error:
            raise WeightsError(f"bucket {number} cannot be used: {error}") from None
        _check(bucket, number, manifest)

    def leave_group(self) -> None:
        """Let go of the collective group, if there is one."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def close(self) -> None:
        """Let go of everything."""
        self.leave_group()
        if self._file is not None:
            self._file.unlink()


def _check(bucket: np.ndarray, number: int, manifest: Manifest) -> None:
    if checksum(bucket) != manifest.checksums[number]:
        raise WeightsError(f"bucket {number} of {len(manifest.checksums)} arrived damaged")

"""Reads the learner's snapshots for rollouts that cannot: whole buckets, or what changed since a version they have."""

from __future__ import annotations

import numpy as np

from services.broadcaster.ring import Snapshot
from shared import delta
from shared.errors import WeightsError
from shared.snapshot import Manifest, SnapshotFile


class Source:
    """One snapshot in the learner's file, and what changed in it since others. All methods run in threads.

    Raises WeightsError where the learner is on another host.
    """

    _file: SnapshotFile

    def __init__(self, path: str, snapshot: Snapshot, before: Source | None = None) -> None:
        """before: another snapshot's, whose file this one shares if it is the same."""
        self.path = path
        self.snapshot = snapshot
        self.manifest = Manifest.from_wire(snapshot.manifest)
        self._deltas: dict[tuple[int, int, int], bytes | None] = {}
        if before is not None and before.path == path:
            self._file = before._file
        else:
            try:
                self._file = SnapshotFile.attach(path, self.manifest.layout)
            except WeightsError as error:
                raise WeightsError(f"the broadcaster must run on the learner's host: {error}") from None
        self.buckets: list[np.ndarray] = self._file.buckets(snapshot.slot, self.manifest.bucket_bytes)

    def delta(self, base: Snapshot, number: int) -> bytes | None:
        """What changed in a bucket since `base`; None where all of it is smaller, or the base is overwritten by now."""
        key = (*base.id, number)
        if key not in self._deltas:
            old = self._file.buckets(base.slot, self.manifest.bucket_bytes)[number]
            coded = delta.encode(old, self.buckets[number], self.manifest.layout.item_bytes)
            self._deltas[key] = coded if self._file.holds(base.slot, *base.id) else None
        return self._deltas[key]

    def deltas(self, base: Snapshot) -> list[bytes] | None:
        """Those of all buckets; None where one of them has none."""
        found = []
        for number in range(len(self.buckets)):
            coded = self.delta(base, number)
            if coded is None:
                return None
            found.append(coded)
        return found

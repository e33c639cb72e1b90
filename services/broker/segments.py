"""Large columns, in plain files beside the journal, which tells where they lie: SQLite would write each byte twice."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from shared.errors import DataError

SEGMENT_BYTES = 256 << 20
_RECORD = struct.Struct("<QQQ")


class Place(NamedTuple):
    """Where a frame lies. record: offset, size in bytes and XXH3 (64 bits) of the frame."""

    segment: int
    record: bytes


class Segments:
    """Files that are only ever appended to, and removed once nobody needs a byte of them.

    A process never goes on with a file of an earlier one, whose end may be torn.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._number = max(self._existing(), default=0)
        self._file: int | None = None
        self._size = 0

    def append(self, frame: memoryview) -> Place:
        """Write a frame. Raises OSError where that cannot be."""
        if self._file is None or self._size >= SEGMENT_BYTES:
            self.close()
            self._number += 1
            self._file = os.open(self._path(self._number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        at, left = self._size, frame
        while left:
            written = os.write(self._file, left)
            self._size += written
            left = left[written:]
        return Place(self._number, _RECORD.pack(at, len(frame), xxhash.xxh3_64_intdigest(frame)))

    def read(self, place: Place) -> bytes:
        """A frame. Raises DataError where it is not there as it was written."""
        at, size, checksum = _RECORD.unpack(place.record)
        path = self._path(place.segment)
        remedy = f"put a good copy in its place, or move {self._journal} away to begin without what was queued"
        try:
            with path.open("rb") as file:
                file.seek(at)
                frame = file.read(size)
        except OSError as error:
            raise DataError(
                f"{path}, which belongs to the journal, cannot be read ({error.strerror}): {remedy}"
            ) from None
        if len(frame) < size or xxhash.xxh3_64_intdigest(frame) != checksum:
            raise DataError(f"{path}, which belongs to the journal, is damaged: {remedy}")
        return frame

    def keep(self, needed: set[int]) -> None:
        """Remove all segments but these and the one that is written."""
        current = set() if self._file is None else {self._number}
        for number in self._existing() - needed - current:
            self._path(number).unlink(missing_ok=True)

    def sync(self) -> None:
        """Wait until all is on the disk."""
        if self._file is not None:
            os.fdatasync(self._file)

    def close(self) -> None:
        """Begin no more with this file."""
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file, self._size = None, 0

    def _path(self, number: int) -> Path:
        return self._journal.with_name(f"{self._journal.stem}-{number:06d}.columns")

    def _existing(self) -> set[int]:
        names = self._journal.parent.glob(f"{self._journal.stem}-*.columns")
        return {int(path.stem.rpartition("-")[2]) for path in names}

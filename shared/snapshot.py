"""Snapshots of the policy's weights in shared memory: a ring of flat slots, laid out by parameter.

The learner writes a slot; engines on the same host use its tensors in place. A slot carries (lineage, version, state)
in the file's header, so that a reader can see, without asking anybody, that its slot was taken away.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from shared.errors import ProtocolError, WeightsError

if TYPE_CHECKING:
    import torch

MAGIC = b"stretto\x01"
PAGE = 4096
ALIGNMENT = 64
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FREE, WRITING, READY = 0, 1, 2
PREFIX = "stretto-"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


def shared_folder() -> Path:
    """The host's shared-memory folder: $STRETTO_SHM, by default /dev/shm."""
    return Path(os.environ.get("STRETTO_SHM", "/dev/shm"))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor lies in a slot: name to (dtype, shape, offset in bytes). size_bytes: of a slot."""

    tensors: dict[str, tuple[str, tuple[int, ...], int]]
    size_bytes: int

    @property
    def item_bytes(self) -> int:
        """Bytes of the smallest item."""
        return min(ITEM_BYTES[dtype] for dtype, _, _ in self.tensors.values())

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Layout:
        """All tensors one after the other, each at a multiple of 64 bytes; the slot is a whole number of pages."""
        tensors, offset = {}, 0
        for name, shape in shapes.items():
            tensors[name] = (dtype, tuple(shape), offset)
            offset += -(-math.prod(shape) * ITEM_BYTES[dtype] // ALIGNMENT) * ALIGNMENT
        return cls(tensors, -(-offset // PAGE) * PAGE)

    def digest(self) -> bytes:
        """32 bytes that two equal layouts share."""
        return hashlib.sha256(repr((sorted(self.tensors.items()), self.size_bytes)).encode()).digest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a reader needs to trust a snapshot.

    checksums: XXH3 (64 bits) of each bucket of `bucket_bytes` of the slot. probe_tokens: a fixed sequence;
    probe_logprobs: the learner's log-prob of each of its tokens after the first, which the reader must reproduce.
    """

    layout: Layout
    bucket_bytes: int
    checksums: list[int]
    probe_tokens: list[int]
    probe_logprobs: list[float]

    def to_wire(self) -> dict[str, Any]:
        """A map of plain values."""
        return {
            "tensors": [[name, dtype, list(shape), at] for name, (dtype, shape, at) in self.layout.tensors.items()],
            "size_bytes": self.layout.size_bytes,
            "bucket_bytes": self.bucket_bytes,
            "checksums": self.checksums,
            "probe_tokens": self.probe_tokens,
            "probe_logprobs": self.probe_logprobs,
        }

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_wire`. Raises ProtocolError where the map is not a manifest."""
        try:
            tensors = {
                str(name): (str(dtype), tuple(int(n) for n in shape), int(at))
                for name, dtype, shape, at in wire["tensors"]
            }
            size_bytes, bucket_bytes = int(wire["size_bytes"]), int(wire["bucket_bytes"])
            checksums = [int(c) for c in wire["checksums"]]
            probe = [int(t) for t in wire["probe_tokens"]], [float(p) for p in wire["probe_logprobs"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError("bad_header", f"not a manifest: {type(error).__name__}: {error}") from None
        for name, (dtype, shape, at) in tensors.items():
            inside = dtype in ITEM_BYTES and min((at, *shape), default=0) >= 0 and at % ALIGNMENT == 0
            if not inside or at + math.prod(shape) * ITEM_BYTES[dtype] > size_bytes:
                raise ProtocolError("bad_header", f"the manifest puts {name[:64]!r} outside of its slot")
        if min(size_bytes, bucket_bytes) <= 0 or len(checksums) != -(-size_bytes // bucket_bytes):
            raise ProtocolError("bad_header", "the manifest's checksums do not cover its slot")
        if len(probe[0]) < 2 or len(probe[1]) != len(probe[0]) - 1:
            raise ProtocolError("bad_header", "the manifest's probe has not a log-prob for each token after its first")
        return cls(Layout(tensors, size_bytes), bucket_bytes, checksums, *probe)


class SnapshotFile:
    """A file in shared memory that holds `slots` snapshots of one layout."""

    def __init__(self, path: Path, layout: Layout, memory: mmap.mmap) -> None:
        self.path = path
        self.layout = layout
        self._memory = memory
        self._slots = (len(memory) - PAGE) // layout.size_bytes
        # One (lineage, version, state) a slot, after magic and digest.
        self._stamps = np.frombuffer(memory, dtype="<i8", count=3 * self._slots, offset=64).reshape(-1, 3)
        self._bytes = np.frombuffer(memory, dtype="u1", offset=PAGE).reshape(self._slots, layout.size_bytes)
        self._tensors: dict[int, dict[str, torch.Tensor]] = {}

    @classmethod
    def create(cls, name: str, layout: Layout, slots: int) -> SnapshotFile:
        """A new file, every page of it touched, since the first write to a fresh page is twenty times slower.

        Files that a killed process left behind make room first. Raises WeightsError where shared memory has none.
        """
        path = _path_of(name)
        _remove_abandoned(path.parent)
        size = PAGE + slots * layout.size_bytes
        room = os.statvfs(path.parent)
        if size > room.f_bavail * room.f_frsize:
            raise WeightsError(
                f"{slots} snapshots of {layout.size_bytes >> 20} MiB do not fit into {path.parent} "
                f"({room.f_bavail * room.f_frsize >> 20} MiB free): give it more room (containers: shm_size)"
            )
        path.unlink(missing_ok=True)
        with path.open("xb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the mapping's copy of the descriptor keeps it until the process ends
            os.fchmod(file.fileno(), 0o600)
            file.truncate(size)
            memory = mmap.mmap(file.fileno(), size)
        memory[:40] = MAGIC + layout.digest()
        snapshot = cls(path, layout, memory)
        snapshot._stamps[:] = (0, -1, FREE)
        snapshot._bytes[:] = 0
        return snapshot

    @classmethod
    def attach(cls, name: str, layout: Layout) -> SnapshotFile:
        """The file that another process created. Raises WeightsError where it is missing or has another layout."""
        path = _path_of(name)
        try:
            with path.open("rb+") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"cannot open the snapshots {path} ({error}): the rollout must share the learner's host and its "
                "shared memory (containers: ipc)"
            ) from None
        fits = (len(memory) - PAGE) % layout.size_bytes == 0 and len(memory) > PAGE
        if memory[:40] != MAGIC + layout.digest() or not fits:
            raise WeightsError(f"{path} does not hold snapshots of this model")
        return cls(path, layout, memory)

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        """The tensors of a slot by name, views on the shared memory."""
        if slot not in self._tensors:
            import torch

            self._tensors[slot] = {
                name: torch.frombuffer(
                    self._memory,
                    dtype=getattr(torch, dtype),
                    count=math.prod(shape),
                    offset=PAGE + slot * self.layout.size_bytes + at,
                ).view(shape)
                for name, (dtype, shape, at) in self.layout.tensors.items()
            }
        return self._tensors[slot]

    def begin(self, slot: int) -> None:
        """The slot is being written: whoever still reads it must see that."""
        self._stamps[slot] = (0, -1, WRITING)

    def seal(self, slot: int, lineage: int, version: int) -> None:
        """The slot is complete."""
        self._stamps[slot] = (lineage, version, READY)

    def holds(self, slot: int, lineage: int, version: int) -> bool:
        """Whether a slot still holds a version."""
        return bool((self._stamps[slot] == (lineage, version, READY)).all())

    def buckets(self, slot: int, bucket_bytes: int) -> list[np.ndarray]:
        """The bytes of a slot in pieces: u1 arrays, views on the shared memory."""
        flat = self._bytes[slot]
        return [flat[at : at + bucket_bytes] for at in range(0, len(flat), bucket_bytes)]

    def checksums(self, slot: int, bucket_bytes: int) -> list[int]:
        """XXH3 (64 bits) of each bucket of a slot."""
        return [checksum(bucket) for bucket in self.buckets(slot, bucket_bytes)]

    def verify(self, slot: int, manifest: Manifest) -> None:
        """Raises WeightsError where a bucket of a slot is not what its manifest says."""
        found = self.checksums(slot, manifest.bucket_bytes)
        wrong = [i for i, (a, b) in enumerate(zip(found, manifest.checksums, strict=True)) if a != b]
        if wrong:
            raise WeightsError(f"{len(wrong)} of {len(found)} buckets of slot {slot} of {self.path} are damaged")

    def unlink(self) -> None:
        """Remove the file; whoever has it open keeps it until it is done."""
        self.path.unlink(missing_ok=True)


def is_here(name: str) -> bool:
    """Whether a snapshot file lies in this host's shared memory."""
    return _path_of(name).exists()


def checksum(bucket: np.ndarray) -> int:
    """XXH3 (64 bits) of some bytes."""
    return xxhash.xxh3_64_intdigest(bucket.data)


def _path_of(name: str) -> Path:
    """The file of a name from the wire, which is never a path."""
    if not _NAME.match(name):
        raise ProtocolError("bad_header", f"{name[:64]!r} is not a name of a snapshot file")
    return shared_folder() / name


def _remove_abandoned(folder: Path) -> None:
    """Remove the snapshot files that no process holds the lock of: those who made them were killed."""
    for path in folder.glob(f"{PREFIX}*"):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if file.read(len(MAGIC)) == MAGIC:
                    path.unlink(missing_ok=True)
        except OSError:
            continue  # it is in use, or another user's, or gone already

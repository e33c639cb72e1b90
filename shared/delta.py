"""What changed between two versions of a bucket of weights, without loss: the bit patterns, by position.

An update of RL moves most weights by less than half a step of bfloat16, so most bit patterns stay as they are, and
those that change mostly go to their neighbour. A delta holds the gaps between the changed positions and the differences
of the patterns taken as whole numbers, both compressed.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

_HEAD = struct.Struct("<IBI")
"""Changed items, bytes of a gap (1, 2 or 4), bytes of the compressed gaps."""
_LEVEL = 1


def encode(old: np.ndarray, new: np.ndarray, item_bytes: int) -> bytes | None:
    """The delta from `old` to `new`, or None where it would not be smaller than `new`.

    old, new: u1 arrays of one length, a multiple of item_bytes (2 or 4).
    """
    before, after = old.view(f"<u{item_bytes}"), new.view(f"<u{item_bytes}")
    changed = np.flatnonzero(before != after)
    if len(changed) * (item_bytes + 1) > len(new):
        return None
    gaps = np.diff(changed, prepend=-1) - 1
    gap_bytes = 1 if gaps.max(initial=0) < 1 << 8 else 2 if gaps.max() < 1 << 16 else 4
    packed_gaps = zlib.compress(gaps.astype(f"<u{gap_bytes}").tobytes(), _LEVEL)
    packed_steps = zlib.compress((after[changed] - before[changed]).tobytes(), _LEVEL)
    delta = _HEAD.pack(len(changed), gap_bytes, len(packed_gaps)) + packed_gaps + packed_steps
    return delta if len(delta) < len(new) else None


def apply(delta: bytes | memoryview, bucket: np.ndarray, item_bytes: int) -> None:
    """Turn the old bytes in `bucket` (u1, writable) into the new ones. Raises ValueError for what is not a delta."""
    items = bucket.view(f"<u{item_bytes}")
    if len(delta) < _HEAD.size:
        raise ValueError("a delta begins with its head")
    count, gap_bytes, middle = _HEAD.unpack_from(delta)
    if count > len(items) or gap_bytes not in (1, 2, 4):
        raise ValueError("a delta of another bucket")
    packed = memoryview(delta)[_HEAD.size :]
    gaps = np.frombuffer(_unpack(packed[:middle], count * gap_bytes), f"<u{gap_bytes}")
    steps = np.frombuffer(_unpack(packed[middle:], count * item_bytes), f"<u{item_bytes}")
    changed = np.cumsum(gaps.astype("i8") + 1) - 1
    if count and changed[-1] >= len(items):
        raise ValueError("a delta of a longer bucket")
    items[changed] += steps


def _unpack(packed: memoryview, size: int) -> bytes:
    """Exactly `size` bytes, never more in memory."""
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, size + 1)
    except zlib.error as error:
        raise ValueError(f"a damaged delta: {error}") from None
    if len(data) != size:
        raise ValueError("a delta of another length")
    return data

"""A reward for benchmarks: it differs between samples, so that every group is trained on."""

from __future__ import annotations

import zlib


def noise(completion: str) -> float:
    """A number from 0 to 1 that depends on the text alone."""
    return zlib.crc32(completion.encode()) / 2**32

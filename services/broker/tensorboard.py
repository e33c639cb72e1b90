"""TensorBoard's event files: the figures of a run, for who likes to see them there.

Written here, as TFRecord and tensorflow/core/util/event.proto have it, since the packages that write it import torch or
TensorFlow where these are installed: 180 MiB and two seconds of a broker.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

DOUBLE, BYTES, FLOAT = 1, 2, 5
"""Wire types of Protocol Buffers; 0 is a varint."""
LARGEST = (2 - 2**-23) * 2.0**127
SESSION_START = b"\x08\x01"


class EventFile:
    """Adds to the event files of a folder. Each record is written at once, and is there if the process is killed."""

    def __init__(self, folder: Path, version: int) -> None:
        """A file of its own for this process. What earlier ones hold of steps after `version` counts no more."""
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._write(_field(3, BYTES, b"brain.Event:2"))
        self.rewind(version)

    def log(self, version: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a version."""
        values = [
            _field(1, BYTES, _field(1, BYTES, name.encode()) + _field(2, FLOAT, _float(value)))
            for name, value in figures.items()
        ]
        self._write(_step(version) + _field(5, BYTES, b"".join(values)))

    def rewind(self, version: int) -> None:
        """The steps after `version` are made again, and what was written of them counts no more."""
        self._write(_step(version + 1) + _field(7, BYTES, SESSION_START))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, fields: bytes) -> None:
        """Append an event of now: its length and its bytes, each with a checksum."""
        event = _field(1, DOUBLE, struct.pack("<d", time.time())) + fields
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))


def _step(step: int) -> bytes:
    return b"\x10" + _varint(step)


def _field(number: int, wire: int, content: bytes) -> bytes:
    return bytes([number << 3 | wire]) + (_varint(len(content)) if wire == BYTES else b"") + content


def _float(value: float) -> bytes:
    """As float32; what is too large for that is the largest there is."""
    return struct.pack("<f", value if math.isinf(value) else min(max(value, -LARGEST), LARGEST))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(found + bytes([value]))


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and offset as TFRecord has it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

"""Turns messages into frames and back: a msgpack header, and the columns as raw little-endian arrays. See SPEC.md.

Nothing that arrives is evaluated; whatever breaks the rules raises ProtocolError and has no other effect.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import zmq

from protocol.messages import PROTOCOL_VERSION, Body, parse_body
from shared.errors import ProtocolError
from shared.group import Columns

DTYPES: dict[str, np.dtype[Any]] = {
    "u1": np.dtype("u1"),
    "i4": np.dtype("<i4"),
    "i8": np.dtype("<i8"),
    "f2": np.dtype("<f2"),
    "f4": np.dtype("<f4"),
    "f8": np.dtype("<f8"),
    "bool": np.dtype("?"),
}
"""Those of the wire, but for bf16, which NumPy does not know by itself."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_DIMENSIONS = 8
_BOOL = DTYPES["bool"]
PACKED_BELOW = 16_384
"""Columns of fewer bytes share one frame: a frame of its own costs about as much time as so many bytes."""
_ALIGNMENT = 8

Frame = bytes | memoryview | zmq.Frame


def dtype_named(name: Any) -> np.dtype[Any] | None:
    """The dtype of this name on the wire, None where there is none."""
    if name == "bf16":
        import ml_dtypes  # half a second, which only those who use it should wait

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return DTYPES.get(name) if isinstance(name, str) else None


@dataclass(frozen=True, slots=True)
class Limits:
    """What a message may hold at most; a larger one is refused with `too_large`."""

    header_bytes: int = 8 << 20
    frame_bytes: int = 256 << 20
    message_bytes: int = 1 << 30
    columns: int = 65_536
    nesting: int = 16
    length: int = 65_536


@dataclass(slots=True)
class Message:
    """A body with its columns. id: 16 bytes, chosen by who asks, repeated by who answers."""

    body: Body
    columns: Columns = field(default_factory=dict)
    id: bytes = field(default_factory=lambda: os.urandom(16))


def encode(message: Message) -> list[bytes | memoryview]:
    """The frames of a message. Large columns are not copied: their arrays must not change until they are sent.

    Raises ProtocolError `bad_column` for a dtype that the wire does not know.
    """
    table, frames = columns_to_frames(message.columns)
    body = message.body
    header = {
        "v": PROTOCOL_VERSION,
        "type": body.type,
        "id": message.id,
        "body": body.model_dump(),
        "columns": table,
    }
    return [msgpack.packb(header), *frames]


def columns_to_frames(columns: Columns) -> tuple[list[list[Any]], list[bytes | memoryview]]:
    """A [name, dtype, shape] of each column, and their frames: one that holds all small ones, and one a large one.

    Raises ProtocolError `bad_column` for a dtype that the wire does not know.
    """
    table: list[list[Any]] = []
    small: list[bytes] = []
    large: list[bytes | memoryview] = []
    for name, array in columns.items():
        dtype = _NAMES.get(array.dtype) or ("bf16" if array.dtype.name == "bfloat16" else None)
        if dtype is None:
            raise ProtocolError("bad_column", f"{name} is {array.dtype}; the wire knows {', '.join(DTYPES)}, bf16")
        table.append([name, dtype, array.shape])
        if array.nbytes < PACKED_BELOW:
            small += (array.tobytes(), bytes(-array.nbytes % _ALIGNMENT))
        else:
            large.append(np.ascontiguousarray(array).reshape(-1).view("u1").data)
    return table, [b"".join(small), *large] if small else large


def columns_from_frames(table: list[Any], frames: Sequence[memoryview]) -> Columns:
    """The inverse: read-only arrays, large ones as views on their frames, small ones on one copy of theirs.

    The copy is there because what receives a small frame may keep it in one piece of memory with others. Raises
    ProtocolError `bad_frame` or `bad_column` where the frames are not those of the table.
    """
    shapes = [_column(entry) for entry in table]
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in shapes]
    small = [size + -size % _ALIGNMENT for size in sizes if size < PACKED_BELOW]
    expected = [sum(small)] if small else []
    expected += [size for size in sizes if size >= PACKED_BELOW]
    if [frame.nbytes for frame in frames] != expected:
        raise ProtocolError("bad_frame", f"the columns are frames of {expected[:8]} bytes; received other ones")
    packed, at = bytes(frames[0]) if small else b"", 0
    large = iter(frames[1:] if small else frames)
    columns: Columns = {}
    for (name, dtype, shape), size in zip(shapes, sizes, strict=True):
        try:
            if size < PACKED_BELOW:
                array: np.ndarray = np.ndarray(shape, dtype, packed, at)
                at += size + -size % _ALIGNMENT
            else:
                array = np.ndarray(shape, dtype, next(large))
                array.flags.writeable = False
        except (ValueError, OverflowError):  # without elements, and beyond NumPy's largest array all the same
            raise ProtocolError("bad_column", f"{name} has no valid shape") from None
        if dtype is _BOOL and size and array.view("u1").max() > 1:
            raise ProtocolError("bad_column", f"{name} is bool and holds bytes other than 0 and 1")
        columns[name] = array
    if len(columns) < len(table):
        raise ProtocolError("bad_column", "a column is there twice")
    return columns


def decode(frames: Sequence[Frame], limits: Limits = Limits()) -> Message:
    """The message in these frames; its columns are read-only.

    Raises ProtocolError with the codes `bad_frame`, `bad_header`, `bad_version`, `unknown_type`, `too_large` or
    `bad_column`.
    """
    buffers = [_buffer(frame) for frame in frames]
    header = _header(buffers, limits)
    columns = _columns(header["columns"], buffers[1:], limits)
    return Message(parse_body(header["type"], header["body"]), columns, header["id"])


def message_id(frames: Sequence[Frame]) -> bytes | None:
    """The id of a message that could not be decoded, for the refusal; None when it cannot be told."""
    try:
        return bytes(_header([_buffer(frame) for frame in frames], Limits())["id"])
    except ProtocolError:
        return None


def join_groups(groups: Sequence[Columns]) -> Columns:
    """The columns of several groups for one message: `<position>/<column>`."""
    return {f"{i}/{name}": array for i, columns in enumerate(groups) for name, array in columns.items()}


def part_groups(columns: Mapping[str, np.ndarray], count: int) -> list[Columns]:
    """The inverse of `join_groups`. Raises ProtocolError `bad_column` for a name that has no such position."""
    groups: list[Columns] = [{} for _ in range(count)]
    for name, array in columns.items():
        position, slash, column = name.partition("/")
        if not slash or not position.isdecimal() or int(position) >= count:
            raise ProtocolError("bad_column", f"{name[:64]!r} is not a column of one of {count} groups")
        groups[int(position)][column] = array
    return groups


def _buffer(frame: Frame) -> memoryview:
    return memoryview(frame.buffer if isinstance(frame, zmq.Frame) else frame)


def _header(buffers: Sequence[memoryview], limits: Limits) -> dict[str, Any]:
    if not buffers:
        raise ProtocolError("bad_frame", "a message has at least a header")
    if buffers[0].nbytes > limits.header_bytes:
        raise ProtocolError("too_large", f"header of {buffers[0].nbytes} bytes; the limit is {limits.header_bytes}")
    try:
        header = msgpack.unpackb(
            buffers[0],
            strict_map_key=True,
            max_map_len=limits.length,
            max_array_len=limits.length,
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises a dozen types for malformed bytes, ValueError and its own
        raise ProtocolError("bad_header", f"not msgpack within the limits: {type(error).__name__}") from None
    if not isinstance(header, dict) or set(header) != {"v", "type", "id", "body", "columns"}:
        raise ProtocolError("bad_header", "the header is a map of v, type, id, body and columns")
    if header["v"] != PROTOCOL_VERSION:
        raise ProtocolError("bad_version", f"protocol {str(header['v'])[:16]}; this side speaks {PROTOCOL_VERSION}")
    well_typed = (
        isinstance(header["type"], str)
        and isinstance(header["id"], bytes)
        and len(header["id"]) == 16
        and isinstance(header["body"], dict)
        and isinstance(header["columns"], list)
    )
    if not well_typed:
        raise ProtocolError("bad_header", "type is text, id 16 bytes, body a map and columns an array")
    _check_plain(header["body"], limits.nesting)
    return header


def _check_plain(value: Any, levels: int) -> None:
    """Refuse what is nested too deeply or is not a plain value (msgpack timestamps and extensions)."""
    if isinstance(value, dict | list):
        if levels == 0:
            raise ProtocolError("too_large", "the body is nested too deeply")
        for item in value.values() if isinstance(value, dict) else value:
            _check_plain(item, levels - 1)
    elif value is not None and not isinstance(value, str | bytes | int | float):
        raise ProtocolError("bad_header", f"a body holds plain values, not {type(value).__name__}")


def _columns(table: list[Any], buffers: Sequence[memoryview], limits: Limits) -> Columns:
    if len(table) > limits.columns:
        raise ProtocolError("too_large", f"{len(table)} columns; the limit is {limits.columns}")
    if sum(buffer.nbytes for buffer in buffers) > limits.message_bytes:
        raise ProtocolError("too_large", f"columns of more than {limits.message_bytes} bytes")
    return columns_from_frames(table, buffers)


def _column(entry: Any) -> tuple[str, np.dtype[Any], list[int]]:
    if not (isinstance(entry, list) and len(entry) == 3):
        raise ProtocolError("bad_column", "a column is [name, dtype, shape]")
    name, dtype, shape = entry
    if not (isinstance(name, str) and 0 < len(name) <= 128):
        raise ProtocolError("bad_column", "a column has a name of at most 128 characters")
    if (known := dtype_named(dtype)) is None:
        raise ProtocolError("bad_column", f"{name} has no dtype that the wire knows: {', '.join(DTYPES)}, bf16")
    if not (
        isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)
    ):
        raise ProtocolError("bad_column", f"{name} has no valid shape")
    return name, known, shape

"""Turns messages into frames and back: a msgpack header and one raw little-endian frame a column. See SPEC.md.

Nothing that arrives is evaluated or copied; whatever breaks the rules raises ProtocolError and has no other effect.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
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
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "bool": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_DIMENSIONS = 8

Frame = bytes | memoryview | zmq.Frame


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
    """The frames of a message. Column frames are views on the arrays, which must not change until they are sent.

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


def columns_to_frames(columns: Columns) -> tuple[list[list[Any]], list[memoryview]]:
    """A [name, dtype, shape] and the raw bytes of each column, which are views on the arrays.

    Raises ProtocolError `bad_column` for a dtype that the wire does not know.
    """
    table: list[list[Any]] = []
    frames: list[memoryview] = []
    for name, array in columns.items():
        dtype = _NAMES.get(array.dtype)
        if dtype is None:
            raise ProtocolError("bad_column", f"{name} is {array.dtype}; the wire knows {', '.join(DTYPES)}")
        table.append([name, dtype, list(array.shape)])
        frames.append(np.ascontiguousarray(array).reshape(-1).view("u1").data)
    return table, frames


def decode(frames: Sequence[Frame], limits: Limits = Limits()) -> Message:
    """The message in these frames; its columns are read-only views on them.

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
    if len(table) != len(buffers):
        raise ProtocolError("bad_frame", f"{len(table)} columns declared, {len(buffers)} column frames received")
    if sum(buffer.nbytes for buffer in buffers) > limits.message_bytes:
        raise ProtocolError("too_large", f"columns of more than {limits.message_bytes} bytes")
    columns: Columns = {}
    for entry, buffer in zip(table, buffers, strict=True):
        name, array = _column(entry, buffer)
        if name in columns:
            raise ProtocolError("bad_column", f"{name} is there twice")
        columns[name] = array
    return columns


def _column(entry: Any, buffer: memoryview) -> tuple[str, np.ndarray]:
    match entry:
        case [str(name), str(dtype_name), list(shape)] if 0 < len(name) <= 128 and dtype_name in DTYPES:
            pass
        case _:
            raise ProtocolError("bad_column", f"a column is [name, dtype, shape] with a dtype of {', '.join(DTYPES)}")
    if len(shape) > _MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise ProtocolError("bad_column", f"{name} has no valid shape")
    dtype = DTYPES[dtype_name]
    expected = math.prod(shape) * dtype.itemsize
    if expected != buffer.nbytes:
        raise ProtocolError("bad_column", f"{name} should have {expected} bytes and has {buffer.nbytes}")
    raw = np.frombuffer(buffer, dtype="u1")
    if dtype_name == "bool" and raw.size and raw.max() > 1:
        raise ProtocolError("bad_column", f"{name} is bool and holds bytes other than 0 and 1")
    array = raw.view(dtype).reshape(shape)
    array.flags.writeable = False
    return name, array

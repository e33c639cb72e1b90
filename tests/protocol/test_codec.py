"""The codec: what goes in comes out, and what breaks the rules is refused without effect."""

from __future__ import annotations

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protocol.codec import DTYPES, Limits, Message, decode, encode, join_groups, message_id, part_groups
from protocol.messages import Drain, Heartbeat, Ok
from shared.errors import ProtocolError

arrays = st.sampled_from(list(DTYPES.values())).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)


@given(st.dictionaries(st.text(min_size=1, max_size=20), arrays, max_size=5))
def test_columns_survive_the_wire_bit_by_bit(columns):
    frames = [bytes(frame) for frame in encode(Message(Ok(), columns))]
    decoded = decode(frames).columns
    assert list(decoded) == list(columns)
    for name, array in columns.items():
        assert decoded[name].dtype == array.dtype and decoded[name].shape == array.shape
        assert decoded[name].tobytes() == array.tobytes()


def test_bfloat16_travels_as_its_bits():
    column = np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16)
    assert decode(encode(Message(Ok(), {"x": column}))).columns["x"].tolist() == [1.5, -2.0]


def test_small_columns_share_a_frame_and_large_ones_have_their_own():
    columns = {
        "a": np.arange(3, dtype="i4"),
        "large": np.arange(4096, dtype="i4"),
        "b": np.array([True]),
        "larger": np.zeros((2, 4096), dtype="f8"),
        "none": np.zeros(0, dtype="f4"),
        "c": np.array([7], dtype="i8"),
    }
    _, small, *large = (bytes(frame) for frame in encode(Message(Ok(), columns)))
    assert small.hex(" ", 8) == "0000000001000000 0200000000000000 0100000000000000 0700000000000000"
    assert large == [columns["large"].tobytes(), columns["larger"].tobytes()]


def test_a_column_just_below_the_size_of_a_frame_of_its_own_is_packed():
    columns = {"packed": np.zeros(16_383, dtype="u1"), "own": np.zeros(16_384, dtype="u1")}
    assert [len(frame) for frame in encode(Message(Ok(), columns))[1:]] == [16_384, 16_384]


def test_decoded_columns_are_read_only_and_large_ones_are_not_copied():
    frames = encode(Message(Ok(), {"large": np.arange(4096, dtype="i4"), "small": np.arange(4, dtype="i4")}))
    columns = decode(frames).columns
    assert np.shares_memory(columns["large"], np.frombuffer(frames[2], dtype="u1"))
    for column in columns.values():
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


def test_a_strided_column_arrives_in_order():
    column = np.arange(12, dtype="i4").reshape(3, 4).T
    assert decode(encode(Message(Ok(), {"x": column}))).columns["x"].tolist() == column.tolist()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data):
    with pytest.raises(ProtocolError):
        decode([data])


@given(st.data())
def test_a_mutated_message_decodes_or_is_refused(data):
    body = Heartbeat(instance="rollout-0", state="SERVING", stats={"time": {"compute": 1.0}})
    frames = [bytes(f) for f in encode(Message(body, {"x": np.arange(3, dtype="i4")}))]
    header = bytearray(frames[0])
    for _ in range(data.draw(st.integers(1, 4))):
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode([bytes(header), frames[1]])
    except ProtocolError as error:
        assert error.code in {"bad_frame", "bad_header", "bad_version", "unknown_type", "too_large", "bad_column"}


def header(**changes):
    fields = {"v": 1, "type": "drain", "id": b"0" * 16, "body": {"reason": "r"}, "columns": []}
    return msgpack.packb(fields | changes)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([], "bad_frame"),
        ([header(v=2)], "bad_version"),
        ([header(type="no_such")], "unknown_type"),
        ([header(id=b"short")], "bad_header"),
        ([header(extra=1)], "bad_header"),
        ([header(body={"reason": "r", "more": 1})], "bad_header"),
        ([header(body={"reason": 3})], "bad_header"),
        ([header(body={"reason": msgpack.Timestamp(0)})], "bad_header"),
        ([header(columns=[["x", "i4", [2]]])], "bad_frame"),
        ([header(columns=[["x", "i4", [2]]]), b"1234"], "bad_frame"),
        ([header(columns=[["x", "i4", [1]]]), b"1234"], "bad_frame"),
        ([header(columns=[["x", "i4", [4096]]]), bytes(16_383)], "bad_frame"),
        ([header(columns=[["x", "i4", [1]]]), b"12341234", b""], "bad_frame"),
        ([header(columns=[["x", "O", [1]]]), b"12345678"], "bad_column"),
        ([header(columns=[["x", "i4", [-1, -1]]]), b"1234"], "bad_column"),
        ([header(columns=[["x", "i4", [True]]]), b"1234"], "bad_column"),
        ([header(columns=[["x", "i4", [0, 2**62, 2**62]]]), b""], "bad_column"),
        ([header(columns=[["x", "bool", [2]]]), b"\x01\x02" + bytes(6)], "bad_column"),
        ([header(columns=[["x", "u1", [1]], ["x", "u1", [1]]]), bytes(16)], "bad_column"),
        ([header(columns=[["x", "u1", [1]]] * 65_537)], "bad_header"),
        ([b"\x00" * (9 << 20)], "too_large"),
    ],
)
def test_what_breaks_a_rule_is_refused_with_its_code(frames, code):
    with pytest.raises(ProtocolError) as refusal:
        decode(frames)
    assert refusal.value.code == code


def test_deep_nesting_is_refused():
    deep: list = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(ProtocolError, match="nested too deeply"):
        decode([header(type="heartbeat", body={"instance": "a", "state": "SERVING", "stats": {"x": deep}})])


def test_a_message_larger_than_the_limit_is_refused():
    frames = encode(Message(Ok(), {"x": np.zeros(100, dtype="u1")}))
    with pytest.raises(ProtocolError, match="too_large"):
        decode(frames, Limits(message_bytes=99))


def test_a_dtype_that_the_wire_does_not_know_is_refused_at_the_sender():
    with pytest.raises(ProtocolError, match="x is complex64"):
        encode(Message(Ok(), {"x": np.zeros(1, dtype="c8")}))


def test_the_id_of_a_refused_message_is_found_where_it_can_be():
    message = Message(Drain(reason="r"))
    assert message_id([*encode(message), b"surplus"]) == message.id
    assert message_id([b"nonsense"]) is None


def test_columns_of_several_groups_share_a_message():
    groups = [{"a": np.zeros(1)}, {}, {"a": np.ones(2), "b/c": np.ones(1)}]
    parted = part_groups(join_groups(groups), 3)
    assert [list(g) for g in parted] == [["a"], [], ["a", "b/c"]]
    with pytest.raises(ProtocolError, match="bad_column"):
        part_groups({"3/a": np.zeros(1)}, 3)

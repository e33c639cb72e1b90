"""Requests and answers over real sockets."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager

import numpy as np
import pytest
import zmq
import zmq.asyncio

from protocol import channel
from protocol.channel import Client, Server
from protocol.codec import Limits, Message, decode, encode
from protocol.messages import Drain, Heartbeat, Locate, Located, Ok, Pulse, Status, StatusRequest
from shared.errors import ConfigError, ProtocolError, Unreachable


@asynccontextmanager
async def serving(handle, limits=Limits()):
    server = Server("tcp://127.0.0.1:0", handle, limits=limits)
    task = asyncio.create_task(server.run())
    client = Client(server.address)
    try:
        yield server, client
    finally:
        await client.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_request_gets_its_answer_with_columns():
    async def handle(message):
        return Ok(), {"twice": message.columns["x"] * 2}

    async with serving(handle) as (_, client):
        _, columns = await client.request(Drain(reason="r"), Ok, {"x": np.arange(3, dtype="f4")})
        assert columns["twice"].tolist() == [0, 2, 4]


async def test_answers_find_their_request_whatever_their_order():
    gate = asyncio.Event()

    async def handle(message):
        if message.body.wait_ms:
            await gate.wait()
        else:
            gate.set()
        return Located(address=str(message.body.wait_ms))

    async with serving(handle) as (_, client):
        slow = asyncio.create_task(client.request(Locate(service="broadcaster", wait_ms=7), Located))
        await asyncio.sleep(0)
        fast, _ = await client.request(Locate(service="broadcaster", wait_ms=0), Located)
        assert (fast.address, (await slow)[0].address) == ("0", "7")


async def test_a_repeated_request_is_carried_out_once_and_gets_the_same_answer(monkeypatch):
    calls = []

    async def handle(message):
        calls.append(message.body)
        return Located(address=str(len(calls)))

    async with serving(handle) as (server, _):
        frames = encode(Message(Locate(service="learner", wait_ms=0), {}, b"0123456789abcdef"))
        raw = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        raw.connect(server.address)
        answers = []
        for _ in range(3):
            await raw.send_multipart(frames)
            answers.append(await asyncio.wait_for(raw.recv_multipart(), 5))
        raw.close(linger=0)
        assert len(calls) == 1 and answers[0] == answers[1] == answers[2]


async def test_a_repeated_request_that_only_reads_is_answered_anew_and_its_answer_is_not_kept():
    async def handle(message):
        return Status(status={"answers": len(server._answers)})

    async with serving(handle) as (server, client):
        for _ in range(2):
            answer, _ = await client.request(StatusRequest(), Status)
            assert answer.status == {"answers": 0}


async def test_a_lost_request_is_sent_again_until_the_server_is_there(monkeypatch):
    monkeypatch.setattr(channel, "RETRY_S", 0.05)
    probe = Server("tcp://127.0.0.1:0", None)
    address = probe.address
    probe._socket.close(linger=0)
    client = Client(address)
    request = asyncio.create_task(client.request(Drain(reason="r"), Ok, deadline_s=20))
    await asyncio.wait([request], timeout=0.2)
    assert not request.done()

    async def handle(message):
        return Ok()

    server = Server(address, handle)
    task = asyncio.create_task(server.run())
    assert (await request)[0] == Ok()
    await client.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_peer_that_is_not_there_is_named_with_its_address_and_the_time_waited():
    client = Client("tcp://127.0.0.1:9")
    with pytest.raises(Unreachable, match=r"broker tcp://127.0.0.1:9 gave no answer to drain in 0 s"):
        await client.request(Drain(reason="r"), Ok, deadline_s=0.2)
    await client.close()


async def test_a_client_that_is_closed_says_so():
    client = Client("tcp://127.0.0.1:9", peer="broker")
    await client.close()
    with pytest.raises(Unreachable, match=r"broker tcp://127.0.0.1:9 is not asked any more: its client was closed"):
        await client.request(Drain(reason="r"), Ok)


async def test_a_client_that_is_closed_leaves_no_file_open():
    async def handle(message):
        return Ok()

    def open_files():
        return len(os.listdir("/proc/self/fd"))

    async with serving(handle) as (server, _):
        before = open_files()
        for _ in range(20):
            client = Client(server.address)
            await client.request(Drain(reason="r"), Ok)
            await client.close()
        async with asyncio.timeout(30):  # ZeroMQ closes its own in a thread
            while open_files() > before + 10:
                await asyncio.sleep(0.01)


async def test_a_refusal_is_an_error_with_its_code_and_is_counted():
    async def handle(message):
        raise ProtocolError("not_member", "say hello first")

    async with serving(handle) as (server, client):
        with pytest.raises(ProtocolError, match="not_member: say hello first"):
            await client.request(Heartbeat(instance="a", state="SERVING"), Pulse)
        assert server.refused["not_member"] == 1


async def test_a_malformed_message_is_counted_and_the_server_goes_on():
    async def handle(message):
        return Ok()

    async with serving(handle) as (server, client):
        raw = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        raw.connect(server.address)
        await raw.send_multipart([b"\xc1nonsense"])
        await raw.send_multipart([b""])
        await raw.send_multipart([*encode(Message(Drain(reason="r"))), b"one frame too many"])
        refusal = await asyncio.wait_for(raw.recv_multipart(), 5)
        raw.close(linger=0)
        assert b"bad_frame" in refusal[0]
        assert (await client.request(Drain(reason="r"), Ok))[0] == Ok()
        assert server.refused == {"bad_header": 2, "bad_frame": 1}


async def test_a_port_in_use_is_one_clear_sentence():
    async def handle(message):
        return Ok()

    async with serving(handle) as (server, _):
        with pytest.raises(ConfigError, match=f"the address {server.address} is in use: stop the other program"):
            Server(server.address, handle)


async def test_a_request_is_asked_again_as_soon_as_the_server_is_there_again(free_again):
    asked = asyncio.Event()

    async def silent(message):
        asked.set()
        await asyncio.Event().wait()

    async def answering(message):
        return Ok()

    first = Server("tcp://127.0.0.1:0", silent)
    serving_first = asyncio.create_task(first.run())
    client = Client(first.address)
    request = asyncio.create_task(client.request(Drain(reason="r"), Ok, wait_s=60.0))
    await asked.wait()
    serving_first.cancel()
    await asyncio.gather(serving_first, return_exceptions=True)
    await free_again(first.address)
    second = Server(first.address, answering)
    serving_second = asyncio.create_task(second.run())
    async with asyncio.timeout(20.0):  # it would be 65 s without the reconnect
        await request
    await client.close()
    serving_second.cancel()
    await asyncio.gather(serving_second, return_exceptions=True)


# Hostile input


def raw_peer(server):
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.connect(server.address)
    return socket


async def test_a_peer_that_goes_on_breaking_the_rules_is_cut_off_and_others_are_not(monkeypatch):
    monkeypatch.setattr(channel, "MAX_REFUSED", 3)

    async def handle(message):
        return Ok()

    async with serving(handle) as (server, client):
        hostile = raw_peer(server)
        request = encode(Message(Drain(reason="r")))
        await hostile.send_multipart(request)
        await hostile.recv_multipart()
        for _ in range(6):
            await hostile.send_multipart([b"garbage"])
        await hostile.send_multipart(request)
        while server.refused["cut_off"] < 3:
            await asyncio.sleep(0.01)
        await client.request(Drain(reason="r"), Ok)
        assert server.refused == {"bad_header": 4, "cut_off": 3}
        assert not await hostile.poll(100)
        monkeypatch.setattr(channel, "REFUSED_WITHIN_S", 0.0)
        await hostile.send_multipart(request)
        await hostile.recv_multipart()  # it is heard again
        hostile.close(linger=0)


async def test_a_peer_has_only_so_many_requests_under_way(monkeypatch):
    monkeypatch.setattr(channel, "MAX_RUNNING_OF_A_PEER", 2)
    gate = asyncio.Event()

    async def handle(message):
        await gate.wait()
        return Ok()

    async with serving(handle) as (server, client):
        waiting = [asyncio.create_task(client.request(Drain(reason="r"), Ok)) for _ in range(2)]
        while len(server._running) < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(ProtocolError, match="too_many"):
            await client.request(Drain(reason="r"), Ok)
        other = Client(server.address)
        waiting.append(asyncio.create_task(other.request(Drain(reason="r"), Ok)))
        while len(server._running) < 3:
            await asyncio.sleep(0.01)
        gate.set()
        await asyncio.gather(*waiting)
        await client.request(Drain(reason="r"), Ok)
        await other.close()


async def test_a_peer_at_its_limit_may_repeat_what_is_under_way(monkeypatch):
    monkeypatch.setattr(channel, "MAX_RUNNING_OF_A_PEER", 1)
    gate = asyncio.Event()

    async def handle(message):
        await gate.wait()
        return Ok()

    async with serving(handle) as (server, _):
        peer = raw_peer(server)
        request = encode(Message(Drain(reason="r")))
        await peer.send_multipart(request)
        await peer.send_multipart(request)
        await peer.send_multipart(encode(Message(Drain(reason="too many"))))
        assert decode(await peer.recv_multipart()).body.code == "too_many"
        gate.set()
        assert decode(await peer.recv_multipart()) == Message(Ok(), {}, decode(request).id)
        assert server.refused == {"too_many": 1}
        peer.close(linger=0)


async def test_requests_beyond_the_bytes_that_may_be_under_way_wait_in_the_socket(monkeypatch):
    monkeypatch.setattr(channel, "MAX_RUNNING_BYTES", 2500)
    gate = asyncio.Event()
    begun = []

    async def handle(message):
        begun.append(message.id)
        await gate.wait()
        return Ok()

    async with serving(handle) as (server, client):
        columns = {"x": np.zeros(1000, dtype="u1")}
        asked = [asyncio.create_task(client.request(Drain(reason="r"), Ok, columns)) for _ in range(5)]
        while len(begun) < 3:
            await asyncio.sleep(0.01)
        await asyncio.wait(asked, timeout=0.2)
        assert len(begun) == 3
        gate.set()
        await asyncio.gather(*asked)
        assert len(begun) == 5 and server._running_bytes == 0


async def test_a_frame_beyond_the_limit_ends_the_connection_and_is_never_held():
    async def handle(message):
        return Ok()

    async with serving(handle, Limits(frame_bytes=1000)) as (server, client):
        hostile = raw_peer(server)
        await hostile.send_multipart([bytes(2000)])
        await client.request(Drain(reason="r"), Ok)
        assert server.refused == {}
        hostile.close(linger=0)

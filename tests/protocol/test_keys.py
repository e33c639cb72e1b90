"""Keys: who is let in, over real sockets, and that no secret gets out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import stat
from contextlib import asynccontextmanager

import pytest
import zmq

from protocol.channel import Client, Server
from protocol.events import EventPublisher, EventSubscriber
from protocol.keys import find_keys, new_keys, public_key, trust
from protocol.messages import Drain, Event, Ok
from shared.errors import ConfigError, Unreachable

VARIABLES = ("STRETTO_SERVER_PUBLIC", "STRETTO_SERVER_SECRET", "STRETTO_CLIENT_SECRET", "STRETTO_TRUSTED")


@pytest.fixture(autouse=True)
def no_keys(tmp_path, monkeypatch):
    """Neither this user's own keys nor those of the environment."""
    monkeypatch.setenv("STRETTO_KEYS", str(tmp_path / "keys"))
    for name in (*VARIABLES, "STRETTO_INSECURE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def as_host(tmp_path, monkeypatch):
    """Makes this process see the keys of a host: `as_host("broker")`."""

    def become(name):
        folder = tmp_path / name
        monkeypatch.setenv("STRETTO_KEYS", str(folder))
        return folder

    return become


@asynccontextmanager
async def serving():
    """A server, which keeps the reasons it was told."""
    told = []

    async def handle(message):
        told.append(message.body.reason)
        return Ok()

    server = Server("tcp://127.0.0.1:0", handle)
    task = asyncio.create_task(server.run())
    try:
        yield server, told
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ask(address, reason, deadline_s=20.0):
    client = Client(address)
    try:
        await client.request(Drain(reason=reason), Ok, deadline_s=deadline_s)
    finally:
        await client.close()


def test_new_keys_are_readable_by_their_owner_alone_and_never_printed(tmp_path):
    keys = new_keys(tmp_path / "k")
    for file in (tmp_path / "k").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert new_keys(tmp_path / "k") == keys
    assert public_key(keys.server_secret) == keys.server_public
    for secret in (keys.server_secret, keys.client_secret):
        assert secret not in repr(keys) and secret not in str(keys)


def test_a_host_of_clients_has_no_secret_of_the_server(as_host):
    server = new_keys(as_host("broker")).server_public
    keys = new_keys(as_host("node"), server_public=server)
    assert keys.server_public == server and keys.server_secret is None and keys.client_secret is not None
    with pytest.raises(ConfigError, match="lacks the server's secret one"):
        Server("tcp://127.0.0.1:0", None)
    with pytest.raises(ConfigError, match="holds another server's key"):
        new_keys(as_host("node"), server_public=public_key(keys.client_secret))


def test_the_environment_goes_before_the_files(as_host, monkeypatch):
    new_keys(as_host("broker"))
    public, secret = (key.decode() for key in zmq.curve_keypair())
    other, _ = (key.decode() for key in zmq.curve_keypair())
    monkeypatch.setenv("STRETTO_SERVER_SECRET", secret)
    monkeypatch.setenv("STRETTO_CLIENT_SECRET", secret)
    monkeypatch.setenv("STRETTO_TRUSTED", f"{other}, ")
    keys = find_keys()
    assert keys.server_public == keys.client_public == public
    assert set(keys.trusted) == {public, other}


@pytest.mark.parametrize("wrong", ["short", "x" * 40 + "y", "\u00e4" * 40, "~" * 40])
def test_what_is_no_key_is_refused_without_being_shown(monkeypatch, wrong):
    monkeypatch.setenv("STRETTO_CLIENT_SECRET", wrong)
    with pytest.raises(ConfigError, match=r"^STRETTO_CLIENT_SECRET holds something that is no key") as refused:
        find_keys()
    assert wrong not in str(refused.value)


def test_files_that_others_can_read_or_that_are_torn_are_refused(as_host):
    folder = as_host("broker")
    keys = new_keys(folder)
    (folder / "client.json").chmod(0o640)
    with pytest.raises(ConfigError, match="may be read by others: chmod 600"):
        find_keys()
    (folder / "client.json").chmod(0o600)
    (folder / "client.json").write_text(json.dumps({"secret": keys.client_secret})[:-9])
    with pytest.raises(ConfigError, match="cannot be read as a file of keys") as refused:
        find_keys()
    assert keys.client_secret[:10] not in str(refused.value)


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
async def test_other_hosts_cannot_connect_without_keys_unless_it_is_asked_for(monkeypatch, bind):
    with pytest.raises(ConfigError, match="can be reached from other hosts and there are no keys"):
        Server(bind, None)
    with pytest.raises(ConfigError, match="can be reached from other hosts and there are no keys"):
        EventPublisher(bind)
    monkeypatch.setenv("STRETTO_INSECURE", "1")
    publisher = EventPublisher("tcp://0.0.0.0:0")
    publisher.close()


async def test_a_trusted_client_is_let_in_and_strangers_reach_nothing(as_host):
    broker = as_host("broker")
    server_public = new_keys(broker).server_public
    async with serving() as (server, told):
        await ask(server.address, "the broker's own host")
        as_host("nobody")  # has no keys
        with pytest.raises(ConfigError, match="has keys and this process has none"):
            await ask(server.address, "a stranger without a key")
        node = as_host("node")
        client_public = new_keys(node, server_public=server_public).client_public
        as_host("broker")  # the server looks a client up among these
        stranger = _client_of(node, server.address, as_host)
        for _ in range(2):
            with pytest.raises(ConfigError, match="does not trust the key of this host: run `stretto keys trust"):
                await stranger.request(Drain(reason="a stranger with a wrong key"), Ok)
        await stranger.close()
        assert server.refused == {"unknown_key": 1}
        trust(broker, "node", client_public)
        client = _client_of(node, server.address, as_host)
        await client.request(Drain(reason="trusted"), Ok)
        await client.close()
    assert told == ["the broker's own host", "trusted"]


async def test_a_client_does_not_talk_to_a_server_of_another_key(as_host):
    new_keys(as_host("broker"))
    async with serving() as (server, told):
        node = as_host("node")
        impostor = zmq.curve_keypair()[0].decode()
        new_keys(node, server_public=impostor)
        with pytest.raises(Unreachable):
            await ask(server.address, "for another server", deadline_s=0.5)
    assert told == []


def _client_of(folder, address, as_host):
    """A client with the keys of one host, while the process goes on as the broker's."""
    as_host(folder.name)
    client = Client(address)
    as_host("broker")
    return client


async def test_what_was_recorded_on_the_way_cannot_be_sent_again(as_host):
    new_keys(as_host("broker"))
    recorded = []

    async with serving() as (server, told):
        port = int(server.address.rpartition(":")[2])

        async def relay(reader, writer):
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", port)

            async def copy(source, sink, keep):
                while data := await source.read(1 << 16):
                    if keep:
                        recorded.append(data)
                    sink.write(data)
                    await sink.drain()
                sink.close()

            await asyncio.gather(copy(reader, onward_writer, True), copy(onward_reader, writer, False))

        between = await asyncio.start_server(relay, "127.0.0.1", 0)
        await ask(f"tcp://127.0.0.1:{between.sockets[0].getsockname()[1]}", "once")
        assert told == ["once"] and len(recorded) >= 3
        assert b"once" not in b"".join(recorded)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(20):
            with contextlib.suppress(OSError):  # the server may hang up at any time
                for data in recorded:
                    writer.write(data)
                await writer.drain()
                writer.write_eof()
                while await reader.read(1 << 16):  # until the server ends the connection
                    pass
        writer.close()
        await ask(server.address, "after")
        between.close()
    assert told == ["once", "after"]


async def test_events_reach_those_with_a_key_alone(as_host):
    new_keys(as_host("broker"))
    publisher = EventPublisher("tcp://127.0.0.1:0")
    trusted = EventSubscriber()
    as_host("nobody")
    stranger = EventSubscriber()
    as_host("broker")
    for subscriber in (trusted, stranger):
        subscriber.connect(publisher.address)
    heard = asyncio.create_task(anext(trusted.events()))
    overheard = asyncio.create_task(anext(stranger.events()))
    while not heard.done():
        publisher.publish(Event(kind="version", lineage=0, version=1))
        await asyncio.wait([heard], timeout=0.05)
    for _ in range(20):
        publisher.publish(Event(kind="version", lineage=0, version=2))
    await asyncio.wait([overheard], timeout=0.3)
    assert heard.result().version == 1 and not overheard.done()
    overheard.cancel()
    for socket in (trusted, stranger, publisher):
        socket.close()


def test_the_command_line_makes_trusts_and_lists_keys(tmp_path, monkeypatch, capsys):
    import sys

    from stretto import cli
    from stretto.cli import main

    monkeypatch.setattr(cli, "warnings_only", lambda: None)  # it would hold on to the captured stderr

    def stretto(*arguments):
        monkeypatch.setattr(sys, "argv", ["stretto", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    monkeypatch.setenv("STRETTO_KEYS", str(tmp_path / "broker"))
    assert "open to this host alone" in stretto("keys", "list")
    shown = stretto("keys", "new")
    server = re.search(r"server +(\S{40})", shown)[1]
    monkeypatch.setenv("STRETTO_KEYS", str(tmp_path / "node"))
    shown += stretto("keys", "new", "--server-public", server)
    client = re.search(r"stretto keys trust \S+ '(\S{40})'", shown)[1]
    monkeypatch.setenv("STRETTO_KEYS", str(tmp_path / "broker"))
    stretto("keys", "trust", "node", client)
    listed = stretto("keys", "list")
    assert re.search(rf"trusted: node +{re.escape(client)}", listed)
    secrets = [json.loads(f.read_text()).get("secret") for f in tmp_path.rglob("*.json") if f.name != "trusted.json"]
    assert len(secrets) == 4
    for secret in filter(None, secrets):
        assert secret not in shown + listed

"""Reward servers of users: over ZeroMQ in a process of its own, over HTTP, and servers that misbehave."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from aiohttp import web

from protocol.keys import new_keys
from services.reward.servers import OPEN_AFTER
from shared.config import Signal
from shared.errors import ConfigError, StrettoError

ROOT = Path(__file__).parents[3]
SDK = "import sys; from stretto.reward import serve\ndef score(completion, **_): return float(completion)\n"
SDK += "serve(score, sys.argv[1])"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_server_in_a_process_of_its_own_scores_and_may_be_started_again(start_scorer, group):
    address = f"tcp://127.0.0.1:{free_port()}"
    scorer = await start_scorer(Signal(name="mine", server=address))
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", SDK, address]) as process:
            try:
                columns = await scorer.score(group("1", "x", "-2"))
            finally:
                process.kill()
        assert columns["rewards"].tolist() == [1, 0, -2]
        assert columns["reward_status"].tolist() == [0, 2, 0]


async def test_a_reason_that_utf8_cannot_carry_is_escaped(start_scorer, group, http):
    scorer = await start_scorer(Signal(name="mine", server=f"{http}/surrogate"))
    columns = await scorer.score(group("1", "2"))
    assert columns["reward_status"].tolist() == [2, 0]
    assert bytes(columns["reward_reasons"]).endswith(rb"says: \ud800")


async def drip(request):
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


FAULTS = {
    "count": (lambda: web.json_response({"scores": [1]}), "gave 1 scores for 2"),
    "nan": (lambda: web.Response(text='{"scores": [NaN, NaN]}'), "nan"),
    "text": (lambda: web.Response(text="hello"), "not JSON"),
    "500": (lambda: web.Response(status=500), "status 500"),
    "redirect": (lambda: web.Response(status=302, headers={"Location": "/ok"}), "status 302"),
    "huge": (lambda: web.Response(body=b" " * (9 << 20)), "more than"),
    "drip": (None, "gave no answer in 0.5 s"),
    "reason": (lambda: web.json_response({"scores": [{"invalid": "too rude"}] * 2}), "too rude"),
}


@pytest.fixture
async def http():
    asked = []

    async def handle(request):
        kind = request.match_info["kind"]
        sent = await request.json()
        if kind == "drip":
            return await drip(request)
        if kind == "ok":
            assert request.headers["Authorization"] == "Bearer secret-word"
            return web.json_response({"scores": [float(s["completion"]) for s in sent["samples"]]})
        if kind == "openrlhf":
            return web.json_response({"rewards": [len(label) for label in sent["labels"]]})
        if kind == "twice-busy":
            asked.append(kind)
            return web.Response(status=503 if len(asked) < 3 else 200, text='{"scores": [1, 1]}')
        if kind == "surrogate":
            return web.Response(text=r'{"scores": [{"invalid": "\ud800"}, 1]}')
        return FAULTS[kind][0]()

    app = web.Application()
    app.router.add_post("/{kind}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def test_an_http_server_scores(start_scorer, group, http, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret-word")
    scorer = await start_scorer(Signal(name="mine", server=f"{http}/ok", auth_env="TOKEN"))
    assert (await scorer.score(group("1", "2")))["rewards"].tolist() == [1, 2]


async def test_a_server_made_for_openrlhf_scores(start_scorer, group, http):
    scorer = await start_scorer(Signal(name="mine", server=f"{http}/openrlhf", format="openrlhf"))
    assert (await scorer.score(group("1", "2", answer="abc")))["rewards"].tolist() == [3, 3]


@pytest.mark.parametrize(("attempts", "is_scored"), [(2, False), (3, True)])
async def test_a_server_is_asked_as_often_as_the_config_says(start_scorer, group, http, attempts, is_scored):
    scorer = await start_scorer(Signal(name="mine", server=f"{http}/twice-busy"), attempts=attempts)
    if is_scored:
        assert (await scorer.score(group("1", "2")))["rewards"].tolist() == [1, 1]
    else:
        with pytest.raises(StrettoError, match="status 503"):
            await scorer.score(group("1", "2"))


async def test_a_token_is_in_no_error(start_scorer, group, http, monkeypatch):
    monkeypatch.setenv("TOKEN", "secret-word")
    for fault in FAULTS:
        mine = Signal(name="mine", server=f"{http}/{fault}", auth_env="TOKEN")
        scorer = await start_scorer(mine, timeout_s=0.5, attempts=1)
        with structlog.testing.capture_logs() as logs, pytest.raises(StrettoError) as failed:
            await scorer.score(group("1", "2"))
        assert "secret-word" not in f"{failed.value} {logs}"


async def test_a_token_that_is_not_there_is_named(start_scorer, monkeypatch):
    monkeypatch.delenv("TOKEN", raising=False)
    with pytest.raises(ConfigError, match="signal mine: the environment variable TOKEN is not set"):
        await start_scorer(Signal(name="mine", server="http://127.0.0.1:9/", auth_env="TOKEN"))


@pytest.mark.parametrize("scheme", ["tcp", "http"])
async def test_a_server_that_is_not_there_is_named(start_scorer, group, scheme):
    address = f"{scheme}://127.0.0.1:{free_port()}"
    scorer = await start_scorer(Signal(name="mine", server=address), timeout_s=0.5, attempts=1)
    with pytest.raises(StrettoError, match=f"mine: reward server {address} (gave no answer|failed)"):
        await scorer.score(group("1"))


async def test_a_certificate_that_nobody_signed_is_refused(start_scorer, group, tmp_path):
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    files = [str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")]
    subprocess.run(["openssl", *made, "-keyout", files[0], "-out", files[1]], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files[1], files[0])
    asked = []
    server = await asyncio.start_server(lambda reader, writer: asked.append(reader), "127.0.0.1", 0, ssl=context)
    address = f"https://localhost:{server.sockets[0].getsockname()[1]}/"
    scorer = await start_scorer(Signal(name="mine", server=address), attempts=1, timeout_s=5)
    with pytest.raises(StrettoError, match=f"reward server {address} failed: ClientConnectorCertificateError"):
        await scorer.score(group("1"))
    server.close()
    assert asked == []


async def test_with_keys_only_those_that_a_server_trusts_are_answered(start_scorer, group, tmp_path, monkeypatch):
    """The server's process and this one share the keys of one deployment; the stranger has its own."""
    for name in ("ours", "stranger"):
        new_keys(tmp_path / name)
    monkeypatch.setenv("STRETTO_KEYS", str(tmp_path / "ours"))
    address = f"tcp://127.0.0.1:{free_port()}"
    with subprocess.Popen([sys.executable, "-c", SDK, address]) as process:
        try:
            scorer = await start_scorer(Signal(name="mine", server=address))
            assert (await scorer.score(group("1")))["rewards"].tolist() == [1]
            monkeypatch.setenv("STRETTO_KEYS", str(tmp_path / "stranger"))
            stranger = await start_scorer(Signal(name="mine", server=address), timeout_s=1, attempts=1)
            with pytest.raises(StrettoError, match="gave no answer in 1 s"):
                await stranger.score(group("1"))
        finally:
            process.kill()


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_makes_samples_invalid_and_names_the_server(start_scorer, group, http, fault):
    scorer = await start_scorer(Signal(name="mine", server=f"{http}/{fault}"), timeout_s=0.5, attempts=1)
    with pytest.raises(StrettoError, match=FAULTS[fault][1]) as failed:
        await scorer.score(group("1", "2"))
    assert f"{http}/{fault}" in str(failed.value)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
async def test_the_example_in_node_scores(start_scorer, group):
    command = ["node", str(ROOT / "examples/reward_servers/server.js"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = f"http://127.0.0.1:{int(process.stdout.readline())}/score"
            scorer = await start_scorer(Signal(name="mine", server=address))
            assert (await scorer.score(group("it is 4", "5", answer="4")))["rewards"].tolist() == [1, 0]
        finally:
            process.kill()


async def test_a_server_that_keeps_failing_is_left_alone(start_scorer, group, http):
    scorer = await start_scorer(Signal(name="mine", server=f"{http}/500"), attempts=1)
    for _ in range(OPEN_AFTER):
        with pytest.raises(StrettoError, match="status 500"):
            await scorer.score(group("1"))
    with pytest.raises(StrettoError, match="is left alone"):
        await scorer.score(group("1"))

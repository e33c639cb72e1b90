"""Reward servers of users: over ZeroMQ in a process of its own, over HTTP, and servers that misbehave."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from protocol.channel import Client
from protocol.messages import ScoreRequest, Scores
from services.reward.servers import OPEN_AFTER
from shared.config import Signal
from shared.errors import StrettoError

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


SAYS = {
    "1.5": 1.5,
    "True": 1.0,
    "None": None,
    "'3'": "returned str: expected a number or None",
    "10**400": "returned int: int too large to convert to float",
    "{'invalid': 3}": "returned dict: float() argument must be",
    "1 / 0": "ZeroDivisionError: division by zero",
    "fail('\\ud800')": "ValueError: \\ud800",
    "wait(2.0)": 2.0,
}
"""What a function does, and how its server answers."""
DOES = """
import asyncio, sys
from stretto.reward import serve

async def wait(value):
    await asyncio.sleep(0)
    return value

def fail(text):
    raise ValueError(text)

def score(does):
    return eval(does)

def scores(samples):
    does = samples[0].pop("batch", None)
    return eval(does) if does else [eval(sample["does"]) for sample in samples]

serve(scores if sys.argv[2:] else score, sys.argv[1], batch=bool(sys.argv[2:]))
"""


@asynccontextmanager
async def asked(*arguments):
    """Asks one server process, which is still there in the end."""
    address = f"tcp://127.0.0.1:{free_port()}"
    client = Client(address, peer="reward server")
    with subprocess.Popen([sys.executable, "-c", DOES, address, *arguments]) as process:

        async def ask(samples):
            return (await client.request(ScoreRequest(samples=samples), Scores, deadline_s=20))[0].scores

        try:
            yield ask
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        finally:
            process.kill()
            await client.close()


def is_said(found, expected):
    return expected in found["invalid"] if isinstance(expected, str) else found == expected


async def test_whatever_a_function_does_its_server_answers():
    async with asked() as ask:
        found = await ask([{"does": does} for does in SAYS])
        assert [s for s, e in zip(found, SAYS.values(), strict=True) if not is_said(s, e)] == []
        assert "got an unexpected keyword argument" in (await ask([{"does": "1", "other": 2}]))[0]["invalid"]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ("[1, None]", [1, None]),
        ("wait([1, 2])", [1, 2]),
        ("[10**400, 1]", ["returned int", 1]),
        ("[1]", ["ValueError: returned 1 scores for 2 samples"] * 2),
        ("3", ["TypeError: 'int' object is not iterable"] * 2),
        ("None", ["TypeError: 'NoneType' object is not iterable"] * 2),
        ("fail('no')", ["ValueError: no"] * 2),
    ],
)
async def test_whatever_a_batch_function_does_its_server_answers(batch, expected):
    async with asked("batch") as ask:
        found = await ask([{"batch": batch}, {}])
        assert [s for s, e in zip(found, expected, strict=True) if not is_said(s, e)] == []


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

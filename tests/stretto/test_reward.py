"""The SDK of reward servers: one process, one function that does what a sample says, and what its server answers."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest

from protocol.channel import Client
from protocol.messages import ScoreRequest, Scores

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
async def asked(folder, *arguments, end=signal.SIGTERM):
    """Asks one server process, which is still there in the end."""
    address = f"ipc://{folder}/s"
    client = Client(address, peer="reward server")
    with subprocess.Popen([sys.executable, "-c", DOES, address, *arguments]) as process:

        async def ask(samples):
            return (await client.request(ScoreRequest(samples=samples), Scores, deadline_s=20))[0].scores

        try:
            yield ask
            assert process.poll() is None
            process.send_signal(end)
            assert process.wait(10) == 0
        finally:
            process.kill()
            await client.close()


def is_said(found, expected):
    return expected in found["invalid"] if isinstance(expected, str) else found == expected


async def test_whatever_a_function_does_its_server_answers(tmp_path):
    async with asked(tmp_path, end=signal.SIGINT) as ask:
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
async def test_whatever_a_batch_function_does_its_server_answers(tmp_path, batch, expected):
    async with asked(tmp_path, "batch") as ask:
        found = await ask([{"batch": batch}, {}])
        assert [s for s, e in zip(found, expected, strict=True) if not is_said(s, e)] == []

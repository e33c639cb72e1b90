"""Sends mutated messages to a broker, a reward server, a client and an event socket; nothing may come of them.

    python tests/protocol/fuzz.py --messages 1000000

tests/protocol/test_fuzz.py runs a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import msgpack
import numpy as np
import yaml
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from protocol.channel import MAX_REFUSED, Client
from protocol.codec import Message, encode
from protocol.events import EventSubscriber
from protocol.messages import BODIES, Body, Drain, Event, Ok, Resume, ScoreRequest, Scores, Status, StatusRequest
from shared.errors import StrettoError

ROOT = Path(__file__).parents[2]
BATCH = MAX_REFUSED // 2
"""Messages of one connection: before it is cut off another is made."""
MOVING = (Drain, Resume)
VALUES: dict[Any, Any] = {str: "rollout", int: 1, float: 1.0, bool: True, dict: {"a": 1.0}, list: ["g00000000"]}


PARTICULAR: dict[str, Any] = {"leases": [], "letters": [{}], "transports": ["stream"], "size": 2, "delta_bytes": [9]}
PARTICULAR |= {"samples": [{"completion": "x"}], "scores": [1.0]}
"""Valid values of fields that are more than their type."""


def example(body: type[Body]) -> Body:
    """A valid message body of a class."""
    fields = {}
    for name, field in body.model_fields.items():
        options = [field.annotation, *get_args(field.annotation)]
        plain = next((o for o in options if getattr(o, "__origin__", o) in VALUES), None)
        literals = [value for value in options if isinstance(value, str)]
        value = literals[0] if literals else VALUES[getattr(plain, "__origin__", plain)] if plain else None
        fields[name] = PARTICULAR.get(name, value)
    return body.model_validate(fields)


def corpus() -> list[list[bytes]]:
    """The frames of valid messages, with and without columns, of all types but those that may move a run or end it."""
    columns = {"tokens": np.arange(50, dtype="i4"), "tokens_offsets": np.array([0, 50]), "rewards": np.ones(1, "f4")}
    messages = [
        Message(example(body), part) for body in BODIES.values() if body not in MOVING for part in ({}, columns)
    ]
    return [[bytes(frame) for frame in encode(message)] for message in messages]


class Mutator:
    """Makes messages that are nearly right. plain: values of any shape that msgpack can carry, made by hypothesis."""

    def __init__(self, number: int, plain: list[Any]) -> None:
        self._random = random.Random(number)
        self._corpus = corpus()
        self._plain = plain

    def message(self) -> list[bytes]:
        """The frames of one, never without any."""
        frames = list(self._random.choice(self._corpus))
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 4))):
            frames = self._random.choice((self._bytes, self._frames, self._header, self._garbage))(frames)
        return frames or [b""]

    def _bytes(self, frames: list[bytes]) -> list[bytes]:
        """Flip, cut or add bytes of a frame."""
        r = self._random
        at = r.randrange(len(frames)) if frames else 0
        data = bytearray(frames[at] if frames else b"")
        for _ in range(r.randint(1, 4)):
            place = r.randrange(len(data)) if data else 0
            match r.randrange(3):
                case 0 if data:
                    data[place] ^= 1 << r.randrange(8)
                case 1:
                    del data[place : place + r.randint(1, 9)]
                case _:
                    data[place:place] = r.randbytes(r.randint(1, 9))
        return [*frames[:at], bytes(data), *frames[at + 1 :]]

    def _frames(self, frames: list[bytes]) -> list[bytes]:
        """Drop, double or swap frames."""
        r = self._random
        at = r.randrange(len(frames) + 1)
        match r.randrange(3):
            case 0:
                return frames[:at] + frames[at + 1 :]
            case 1:
                return frames[:at] + frames[at - 1 : at] * r.randint(1, 20) + frames[at:]
        return r.sample(frames, len(frames))

    def _header(self, frames: list[bytes]) -> list[bytes]:
        """Put something else in the place of a part of the header."""
        r = self._random
        try:
            header = msgpack.unpackb(frames[0])
            target = r.choice((header, header["body"], header["columns"][0] if header["columns"] else header))
            key = r.choice(list(target)) if isinstance(target, dict) else r.randrange(len(target))
            target[key] = r.choice(self._plain)
            return [msgpack.packb(header), *frames[1:]]
        except Exception:  # it is no header any more
            return frames

    def _garbage(self, frames: list[bytes]) -> list[bytes]:
        return [self._random.randbytes(self._random.randint(0, 200)) for _ in range(self._random.randint(1, 5))]


def plain_values(number: int) -> list[Any]:
    """Values that hypothesis finds worth trying."""
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=300)
        | st.binary(max_size=40)
        | st.sampled_from([2**31, 2**63, [2**40, 2**40], "i4", "../../etc/passwd", "__import__('os')", "learner"])
    )
    found: list[Any] = []

    @seed(number)
    @settings(max_examples=500, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.recursive(leaves, lambda s: st.lists(s, max_size=4) | st.dictionaries(st.text(max_size=9), s, max_size=4))
    )
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


@contextmanager
def broker_process(folder: Path):
    """A broker of a run that never ends, as a process of its own; gives its pid and address."""
    (folder / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 8)
    config = {
        "model": "none",
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "steps": 4,
        "data": {"train": str(folder / "train.jsonl")},
        "reward": {"signals": [{"name": "exact", "function": "exact_match"}]},
        "broker": {"progress_s": 1e6},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run = folder / "run"
    arguments = ["serve", "broker", "--config", str(folder / "config.yaml"), "--run-folder", str(run)]
    log = folder / "broker.jsonl"
    with subprocess.Popen([sys.executable, "-m", "stretto", *arguments, "--log-file", str(log)], cwd=ROOT) as process:
        try:
            end = time.monotonic() + 60
            while not (run / "broker.json").exists():
                assert process.poll() is None and time.monotonic() < end, "the broker does not start"
                time.sleep(0.02)
            yield process.pid, json.loads((run / "broker.json").read_text())["address"]
            assert process.poll() is None, f"the broker ended with {process.returncode}"
        finally:
            process.kill()


def resident_mib(pid: int) -> float:
    """Memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def attack(
    process: tuple[int, str], body: Body, mutator: Mutator, messages: int, show: Callable[[str], None]
) -> list[float]:
    """Messages to a server, which answers `body` after each few of them; its memory in MiB now and then."""
    pid, address = process
    memory: list[float] = []
    for number in range(0, messages, BATCH):
        hostile = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        hostile.connect(address)
        for _ in range(min(BATCH, messages - number)):
            await hostile.send_multipart(mutator.message(), copy=True)
        last = Message(body)
        await hostile.send_multipart(encode(last))  # its answer says that all before it were read
        async with asyncio.timeout(60):
            while (answer := await hostile.recv_multipart()) and last.id not in answer[0]:
                pass
        hostile.close(linger=0)
        if number % (max(messages // 20, 1) // BATCH * BATCH + BATCH) == 0:
            memory.append(resident_mib(pid))
            show(f"{number:,} messages, {memory[-1]:.0f} MiB")
    return memory


async def attack_broker(mutator: Mutator, messages: int, show: Callable[[str], None]) -> dict[str, Any]:
    """Messages to a broker. Raises AssertionError where it does not answer an honest client any more."""
    with tempfile.TemporaryDirectory() as folder, broker_process(Path(folder)) as process:
        memory = await attack(process, StatusRequest(), mutator, messages, show)
        honest = Client(process[1])
        answer, _ = await honest.request(StatusRequest(), Status)
        memory.append(resident_mib(process[0]))
        status = answer.status
        await honest.close()
    accounts = status["groups"]["train"]
    assert accounts["consumed"] == 0 and status["version"] == 0 and status["state"] == "running", status
    refused = sum(status["refused_messages"].values())
    return {"messages": messages, "refused": refused, "by_code": status["refused_messages"], "memory_mib": memory}


async def attack_reward_server(mutator: Mutator, messages: int, show: Callable[[str], None]) -> dict[str, Any]:
    """Messages to a reward server of a user, whose function takes one argument."""
    with tempfile.TemporaryDirectory() as folder:
        address, code = f"ipc://{folder}/s", "import sys; from stretto.reward import serve; serve(len, sys.argv[1])"
        with subprocess.Popen([sys.executable, "-c", code, address], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
            try:
                request = ScoreRequest(samples=[{"completion": "x"}])
                memory = await attack((process.pid, address), request, mutator, messages, show)
                honest = Client(address)
                answer, _ = await honest.request(request, Scores)
                memory.append(resident_mib(process.pid))
                await honest.close()
            finally:
                process.kill()
    assert answer.scores == [{"invalid": "TypeError: len() takes no keyword arguments"}], answer.scores
    return {"messages": messages, "memory_mib": memory}


async def attack_client(mutator: Mutator, messages: int) -> dict[str, Any]:
    """Answers to a client that waits for the right one, which it gets in the end."""
    server = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    server.setsockopt(zmq.ROUTER_MANDATORY, 1)  # wait for the client to read, where it would drop messages otherwise
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client = Client(f"tcp://127.0.0.1:{port}")
    asked = asyncio.create_task(client.request(StatusRequest(), Ok, deadline_s=3600.0))
    route, header = await server.recv_multipart()
    for number in range(messages):
        await server.send_multipart([route, *mutator.message()])
        if number % 500 == 0:
            await asyncio.sleep(0)
    await server.send_multipart([route, *encode(Message(Ok(), {}, msgpack.unpackb(header)["id"]))])
    await asked
    await client.close()
    server.close(linger=0)
    return {"messages": messages, "refused": client.refused}


async def attack_events(mutator: Mutator, messages: int) -> dict[str, Any]:
    """Events to a subscriber, which hears the right one in the end."""
    publisher = zmq.asyncio.Context.instance().socket(zmq.PUB)
    publisher.setsockopt(zmq.SNDHWM, 0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    subscriber = EventSubscriber()
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    heard = 0

    async def listen() -> None:
        nonlocal heard
        async for event in subscriber.events():
            heard += 1
            if event.note == "the last":
                return

    task = asyncio.create_task(listen())
    while not heard:  # the subscription has arrived
        await publisher.send_multipart(encode(Message(Event(kind="version", lineage=0, version=0))))
        await asyncio.wait([task], timeout=0.05)
    for number in range(messages):
        await publisher.send_multipart(mutator.message())
        if number % 500 == 0:
            await asyncio.sleep(0)
    async with asyncio.timeout(600):
        await publisher.send_multipart(encode(Message(Event(kind="version", lineage=0, version=0, note="the last"))))
        await task
    subscriber.close()
    publisher.close(linger=0)
    return {"messages": messages, "refused": subscriber.refused}


async def run(messages: int, number: int, show: Callable[[str], None] = print) -> dict[str, Any]:
    """All four, 60 % of the messages to the broker; returns their figures."""
    mutator = Mutator(number, plain_values(number))
    started = time.monotonic()
    show("a broker")
    figures: dict[str, Any] = {"broker": await attack_broker(mutator, messages * 6 // 10, show)}
    show("a reward server")
    figures["reward_server"] = await attack_reward_server(mutator, messages // 10, show)
    show("a client")
    figures["client"] = await attack_client(mutator, messages * 15 // 100)
    show("an event socket")
    figures["events"] = await attack_events(mutator, messages * 15 // 100)
    return figures | {"seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    try:
        figures = asyncio.run(run(arguments.messages, arguments.seed))
    except StrettoError as error:
        sys.exit(str(error))
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

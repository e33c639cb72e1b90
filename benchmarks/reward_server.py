"""What a reward server made with `stretto.reward` costs: its start, and a group's way there and back over loopback.

    python benchmarks/reward_server.py --json reward_server.json

A real server process whose function does nothing, asked as the reward service asks it: one group after the other, and
many at once. Beside it, the same bytes echoed by a bare ZeroMQ socket in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq

from services.reward.servers import RewardServer
from shared.config import Reward, Signal

SERVE = "from stretto.reward import serve; serve(lambda completion, **_: len(completion), 'tcp://127.0.0.1:{port}')"
ECHO = """
import zmq
socket = zmq.Context().socket(zmq.REP)
socket.bind("tcp://127.0.0.1:{port}")
while True:
    socket.send(socket.recv())
"""
TEXT = "a word " * 60
"""About as long as an answer of 64 tokens."""


def free_port() -> int:
    """A port that nothing listens at."""
    with zmq.Context() as context, context.socket(zmq.REP) as probe:
        return probe.bind_to_random_port("tcp://127.0.0.1")


@contextmanager
def process(code: str, port: int) -> Iterator[None]:
    """A Python process that listens at the port."""
    running = subprocess.Popen([sys.executable, "-c", code.format(port=port)], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        running.kill()
        running.wait()


async def measure(samples: int, groups: int) -> dict[str, Any]:
    """Seconds from the start of the server's process to its first scores, and milliseconds a group."""
    group = [{"prompt": TEXT, "completion": TEXT, "answer": "42", "messages": []} for _ in range(samples)]
    port = free_port()
    with process(SERVE, port):
        began = time.perf_counter()
        signal = Signal(name="s", server=f"tcp://127.0.0.1:{port}", batch_size=samples)
        server = RewardServer(signal, Reward(signals=[signal], timeout_s=30))

        async def score() -> float:
            start = time.perf_counter()
            scores = await asyncio.gather(*(server.score(sample) for sample in group))
            assert [score.value for score in scores] == [len(TEXT)] * samples
            return time.perf_counter() - start

        await score()
        start_s = time.perf_counter() - began
        one_by_one = [await score() for _ in range(groups)]
        began = time.perf_counter()
        await asyncio.gather(*(score() for _ in range(groups)))
        together_s = time.perf_counter() - began
        await server.close()
    bare = echo(msgpack.packb(group), groups)
    return {
        "samples": samples,
        "start_s": round(start_s, 3),
        "ms_a_group": round(1e3 * statistics.median(one_by_one), 3),
        "ms_a_group_together": round(1e3 * together_s / groups, 3),
        "bare_ms_a_group": round(1e3 * bare, 3),
        "ratio_to_bare": round(statistics.median(one_by_one) / bare, 1),
    }


def echo(message: bytes, times: int) -> float:
    """Median seconds of a bare round trip."""
    port = free_port()
    with process(ECHO, port), zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.connect(f"tcp://127.0.0.1:{port}")
        took = []
        for _ in range(times):
            start = time.perf_counter()
            socket.send(message)
            socket.recv()
            took.append(time.perf_counter() - start)
    return statistics.median(took)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="samples of a group")
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    figures = asyncio.run(measure(args.samples, args.groups))
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

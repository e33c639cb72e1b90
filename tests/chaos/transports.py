"""Kills receivers and the broadcaster around broadcasts, with real processes, and measures what it costs the others.

    python tests/chaos/transports.py --repetitions 50

Each repetition publishes a version to the receivers and kills one process at a chosen moment:

    before      a receiver that waits for the version
    during      a receiver that has some of its buckets
    after       a receiver that has the version
    stopped     a receiver is not killed but stopped (SIGSTOP) while it has some of its buckets
    broadcaster the broadcaster, while a receiver has some of its buckets

The others must then hold the right version within `progress_s` + 2 s (a killed broadcaster: 15 s, as a new one has to
start). The killed process is started again and must get the version too. tests/chaos/test_transports.py is a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protocol.channel import Server
from services.broadcaster.service import Broadcaster
from services.learner.slots import Slots
from services.rollout import receiver as receiving
from services.rollout.snapshots import Snapshots
from shared.config import Weights
from shared.log import configure_logging
from shared.snapshot import Layout, Manifest

MOMENTS = ("before", "during", "after", "stopped", "broadcaster")
PROGRESS_S = 3.0
WEIGHTS = Weights(transport="gloo", progress_s=PROGRESS_S, deadline_s=30.0, bucket_mib=1)
ALLOWED_S = PROGRESS_S + 2.0
NEW_BROADCASTER_S = 15.0


class Process:
    """A child of this script that tells its progress in lines of JSON."""

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments

    async def start(self) -> None:
        """Start it, or start it again."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, *self.arguments, stdout=subprocess.PIPE, limit=1 << 20
        )

    async def tells(self, event: str, version: int = -1, within_s: float = 60.0) -> dict[str, Any]:
        """Read until it tells an event, of a version at least."""
        assert self.process.stdout is not None
        async with asyncio.timeout(within_s):
            while line := await self.process.stdout.readline():
                told: dict[str, Any] = json.loads(line)
                if told["event"] == event and told["version"] >= version:
                    return told
        raise SystemExit(f"{self.arguments} ended with {await self.process.wait()}")

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def end(self) -> None:
        """Kill it and wait until it is gone."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class Learner:
    """Publishes versions of random weights, of which every bucket differs."""

    def __init__(self, address: str, mib: int) -> None:
        layout = Layout.of({"weights": (mib << 19,)}, "bfloat16")
        self._random = np.random.default_rng(0)
        self.slots = Slots(address, "chaos", layout, WEIGHTS, patience_s=60.0)

    async def publish(self, version: int) -> None:
        """A new version; to another slot where the broadcaster was started again meanwhile."""
        is_published = False
        while not is_published:
            tensors = await self.slots.acquire(0, version)
            flat = tensors["weights"].view(torch.uint8).numpy()
            flat[:] = self._random.integers(0, 256, len(flat), dtype="u1")
            is_published = await self.slots.publish(0, version, self.slots.manifest([0, 1], [0.0]))


def tell(event: str, version: int, **more: Any) -> None:
    print(json.dumps({"event": event, "version": version, **more}), flush=True)


async def run_broadcaster(port: int) -> None:
    """The broadcaster's process."""
    configure_logging("broadcaster", "broadcaster")
    broadcaster = Broadcaster(WEIGHTS)
    server = Server(f"tcp://127.0.0.1:{port}", broadcaster.handle)
    tell("listens", -1, port=int(server.address.rpartition(":")[2]))
    await asyncio.gather(server.run(), broadcaster.rounds.run())


async def run_receiver(address: str, name: str) -> None:
    """A rollout's process, without an engine."""
    configure_logging("rollout", name)
    snapshots = Snapshots(address, name, WEIGHTS, patience_s=60.0)
    check, held = receiving._check, -1

    def checked(bucket: np.ndarray, number: int, manifest: Manifest) -> None:
        check(bucket, number, manifest)
        if number == 3:
            tell("receives", held + 1)

    receiving._check = checked
    while True:
        tell("waits", held)
        if found := await snapshots.next():
            snapshots.in_use, held = found, found.version
            tell("holds", held)


async def repetitions(
    count: int, receivers: int, mib: int, moments: tuple[str, ...], spare_s: float = 0.0
) -> list[dict[str, Any]]:
    """So many repetitions, one moment after the other; what each cost. spare_s: allowed beyond what is promised."""
    broadcaster = Process("--broadcaster", "0")
    await broadcaster.start()
    port = (await broadcaster.tells("listens"))["port"]
    broadcaster.arguments = ("--broadcaster", str(port))
    address = f"tcp://127.0.0.1:{port}"
    learner = Learner(address, mib)
    members = [Process("--receiver", address, f"rollout-{i}") for i in range(receivers)]
    results = []
    try:
        for member in members:
            await member.start()
        version = 0
        await learner.publish(version)
        await asyncio.gather(*(member.tells("waits", version) for member in members))
        for number in range(count):
            moment = moments[number % len(moments)]
            version += 1
            victim, *others = members[number % receivers :] + members[: number % receivers]
            result = await repetition(moment, version, learner, broadcaster, victim, others, spare_s)
            results.append({"moment": moment} | result)
            print(f"{number + 1}/{count} {moment}: the others had it after {result['others_s']:.2f} s", flush=True)
    finally:
        await asyncio.gather(*(process.end() for process in (broadcaster, *members)))
        await learner.slots.close()
    return results


async def repetition(
    moment: str,
    version: int,
    learner: Learner,
    broadcaster: Process,
    victim: Process,
    others: list[Process],
    spare_s: float,
) -> dict[str, Any]:
    """One version and one death. Raises SystemExit or TimeoutError where the others do not get the version in time."""
    start = time.monotonic()
    others_have_it = asyncio.gather(*(member.tells("holds", version) for member in others))
    within_s = spare_s + (NEW_BROADCASTER_S if moment == "broadcaster" else ALLOWED_S)
    if moment == "before":
        await victim.end()
    await learner.publish(version)
    if moment in ("during", "stopped", "broadcaster"):
        await victim.tells("receives", version)
    if moment == "during":
        await victim.end()
    elif moment == "after":
        await victim.tells("holds", version)
        await victim.end()
    elif moment == "stopped":
        victim.signal(signal.SIGSTOP)
    elif moment == "broadcaster":
        await broadcaster.end()
        await broadcaster.start()
        await broadcaster.tells("listens")
        await learner.publish(version)
    async with asyncio.timeout(within_s + 10.0):
        await others_have_it
    others_s = time.monotonic() - start
    if others_s > within_s:
        raise SystemExit(f"{moment}: the others waited for {others_s:.1f} s; {within_s:.1f} s are allowed")
    if moment == "stopped":
        victim.signal(signal.SIGCONT)
    elif moment != "broadcaster":
        await victim.start()
    await asyncio.gather(*(member.tells("waits", version) for member in (victim, *others)))
    return {"others_s": others_s, "all_s": time.monotonic() - start}


def table(results: list[dict[str, Any]]) -> str:
    """Median and longest seconds by moment."""
    lines = ["| killed | times | others have it, median s | longest s |", "|---|---|---|---|"]
    for moment in dict.fromkeys(result["moment"] for result in results):
        seconds = [result["others_s"] for result in results if result["moment"] == moment]
        lines.append(f"| {moment} | {len(seconds)} | {statistics.median(seconds):.2f} | {max(seconds):.2f} |")
    return "\n".join(lines)


def main() -> None:
    """One of the three kinds of process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--receivers", type=int, default=3)
    parser.add_argument("--mib", type=int, default=64, help="size of a snapshot")
    parser.add_argument("--moments", default=",".join(MOMENTS), help="which, in turn")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--broadcaster", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--receiver", nargs=2, metavar=("ADDRESS", "NAME"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.broadcaster is not None:
        asyncio.run(run_broadcaster(arguments.broadcaster))
    elif arguments.receiver:
        asyncio.run(run_receiver(*arguments.receiver))
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        moments = tuple(arguments.moments.split(","))
        results = asyncio.run(repetitions(arguments.repetitions, arguments.receivers, arguments.mib, moments))
        print(table(results))
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

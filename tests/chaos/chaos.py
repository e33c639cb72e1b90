"""Kills and stops the services of a real run at random, and checks that nothing was lost or done twice.

    python tests/chaos/chaos.py --faults 200

A run of the tiny model goes on while one service after the other is killed (SIGKILL) or stopped (SIGSTOP, until long
after it is missed). Afterwards every admitted group must have been consumed exactly once, be a dead letter, or be
queued. Prints how long it took until the service was back and the run went on, by service and kind of fault.
tests/chaos/test_chaos.py runs a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.config import RunConfig, parse_config
from shared.errors import ProtocolError, Unreachable
from stretto import launcher
from stretto.launcher import LocalRun, instances
from stretto.models import pull

RECOVERY_S = 120.0
"""A run that has not gone on by then is taken for stuck."""


def config_of(folder: Path, model: Path, *, rows: int, **changes: Any) -> RunConfig:
    """A run of the tiny model whose services miss each other soon."""
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1", "answer": str(i + 1)}) + "\n" for i in range(rows))
    )
    tree = {
        "name": "chaos",
        "folder": str(folder / "runs"),
        "model": str(model),
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "max_staleness": 2,
        "data": {"train": str(folder / "train.jsonl")},
        "sampling": {"max_tokens": 8},
        "rollout": {"dtype": "float32", "replicas": 2},
        "learner": {"dtype": "float32", "lr": 1e-4},
        "reward": {"signals": [{"name": "length", "function": "length", "args": {"limit": 8, "buffer": 8}}]},
        "checkpoint": {"every": 10},
        "weights": {"deadline_s": 10.0},
        "broker": {"heartbeat_s": 0.4, "lease_s": 3.0, "max_attempts": 10_000, "progress_s": 300.0},
        "cores": "shared",
    }
    return parse_config(tree | changes)


@dataclass(slots=True)
class Chaos:
    """Injects faults into a run. seconds: to recovery, by service and kind."""

    run: LocalRun
    instances: list[str]
    random: random.Random
    show: Callable[[str], None]
    stop_s: float
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    async def inject(self, faults: int) -> None:
        """One fault after the other, each once the run goes on; some while the one before is still being mended."""
        kinds = [(i, kind) for i in self.instances for kind in ("kill", "stop")]
        deck: list[tuple[str, str]] = []
        for number in range(1, faults + 1):
            deck = deck or self.random.sample(kinds, len(kinds))  # each as often as the others
            instance, kind = deck.pop()
            began = time.monotonic()
            pid = self.run.pids.get(instance)
            if pid is None:  # it is being started again, which is a fault already
                await asyncio.sleep(0.1)
                continue
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            if kind == "stop":
                await asyncio.sleep(self.stop_s)
                if self.run.pids.get(instance) == pid:
                    os.kill(pid, signal.SIGCONT)
            if self.random.random() < 0.25 and number < faults:
                self.show(f"{number}/{faults} {instance}: {kind}, and at once another")
                continue
            await self._recovered(instance, None if kind == "stop" else pid)
            service = instance.rpartition("-")[0] or instance
            self.seconds[service, kind].append(time.monotonic() - began)
            self.show(f"{number}/{faults} {instance}: {kind}, {time.monotonic() - began:.1f} s to recovery")

    async def _recovered(self, instance: str, dead: int | None) -> None:
        """Wait until an instance serves again and a version later than that is committed."""
        async with asyncio.timeout(RECOVERY_S):
            while not (status := await self._status()) or not self._serves(status, instance, dead):
                await asyncio.sleep(0.05)
            version, lineage = status["version"], status["lineage"]
            while (status := await self._status()) is None or (
                status["version"] <= version and status["lineage"] == lineage
            ):
                await asyncio.sleep(0.05)

    def _serves(self, status: dict[str, Any], instance: str, dead: int | None) -> bool:
        if instance == "broker":
            return self.run.pids.get("broker") not in (None, dead)
        return any(
            member["instance"] == instance and member["state"] == "SERVING" and member["pid"] != dead
            for member in status["services"]
        )

    async def _status(self) -> dict[str, Any] | None:
        try:
            return await self.run.status()
        except (Unreachable, ProtocolError):
            return None

    def table(self) -> list[str]:
        """Seconds to recovery by service and kind."""
        lines = ["| service | fault | times | median s | longest s |", "|---|---|---|---|---|"]
        for (service, kind), values in sorted(self.seconds.items()):
            lines.append(
                f"| {service} | {kind} | {len(values)} | {statistics.median(values):.1f} | {max(values):.1f} |"
            )
        return lines


def check_accounts(folder: Path) -> dict[str, Any]:
    """Check, from what a run wrote, that every admitted group is accounted for once; returns its status."""
    status = json.loads((folder / "status.json").read_text())
    train = status["groups"]["train"]
    dropped = sum(train["dropped"].values())
    assert train["admitted"] == train["consumed"] + train["dead"] + dropped + train["in_flight"], train
    batches = consumed_by_version(folder)
    assert sorted(batches) == list(range(1, status["version"] + 1))
    assert all(len(batch) == 2 for batch in batches.values())
    groups = [group for batch in batches.values() for group, _ in batch]
    assert len(set(groups)) == len(groups) == train["consumed"]
    return status


def consumed_by_version(folder: Path) -> dict[int, list[tuple[str, int]]]:
    """The groups of each version and their rows. What was done again stands there twice, and the later counts."""
    batches: dict[int, list[tuple[str, int]]] = {}
    before = None
    for line in (folder / "samples.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["lane"] == "train" and record["version"] is not None:
            if record["version"] != before or len(batches[before]) == 2:
                batches[record["version"]] = []
            before = record["version"]
            batches[before].append((record["group"], record["row"]))
    return batches


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names a run's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) != os.getpid() and str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


async def run_with_faults(
    folder: Path,
    config: RunConfig,
    *,
    faults: int,
    number: int,
    stop_s: float,
    drain: bool,
    show: Callable[[str], None],
) -> Chaos:
    """A run with faults, then drained or left to its end. Raises where it does not recover."""
    run = LocalRun(config, folder / "run", on_event=show, steady_s=0.0)
    chaos = Chaos(run, instances(config), random.Random(number), show, stop_s)
    await run.start()
    waiting = asyncio.create_task(run.wait())
    try:
        while (await run.status(wait_version=1, wait_s=60.0))["version"] < 1:
            pass
        injecting = asyncio.create_task(chaos.inject(faults))
        await asyncio.wait([injecting, waiting], return_when=asyncio.FIRST_COMPLETED)
        injecting.cancel() if waiting.done() else await injecting
        if drain and not waiting.done():
            await run.drain("enough faults")
        await waiting
    finally:
        await run.kill()
    assert not processes_of(folder), "processes were left"
    return chaos


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop-s", type=float, default=5.0, help="how long a stopped service is stopped")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    launcher.FIRST_PAUSE_S = 0.1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = pull("tiny", folder / "tiny")
        config = config_of(folder, model, rows=100, steps=10_000_000)
        started = time.monotonic()
        chaos = asyncio.run(
            run_with_faults(
                folder,
                config,
                faults=arguments.faults,
                number=arguments.seed,
                stop_s=arguments.stop_s,
                drain=True,
                show=lambda text: print(text, flush=True),
            )
        )
        status = check_accounts(folder / "run")
    print(*chaos.table(), sep="\n")
    print(f"{arguments.faults} faults in {time.monotonic() - started:.0f} s; {status['groups']['train']}")
    if arguments.json:
        seconds = {f"{service}/{kind}": values for (service, kind), values in chaos.seconds.items()}
        arguments.json.write_text(json.dumps({"seconds": seconds, "groups": status["groups"]["train"]}, indent=1))


if __name__ == "__main__":
    sys.exit(main())

"""What the broker carries, with and without its journal, beside plain SQLite inserts of the same bytes.

    python benchmarks/broker.py --json broker.json

A real broker process, and this process in the place of rollouts, reward and learner: every group is leased and
completed at two stages, leased by the learner and committed, over TCP of this host. MB/s counts a group's bytes once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import yaml

from protocol.channel import Client
from protocol.messages import Commit, Complete, Heartbeat, Hello, Leased, LeaseRequest, Ok, Pulse, Welcome
from shared.group import Columns, ragged_text

ROOT = Path(__file__).parents[1]
SIZES = {"10 kB": 10_000, "100 kB": 100_000, "1 MB": 1_000_000}
STEP = 32
TOKEN_BYTES = 9
"""Token, log-prob and mask."""


def rollout_columns(size: int) -> Columns:
    """Columns of one sample that are about so many bytes together."""
    n = size // TOKEN_BYTES
    return {
        "prompt_tokens": np.arange(3, dtype="i4"),
        "tokens": np.arange(n, dtype="i4"),
        "tokens_offsets": np.array([0, n], dtype="i8"),
        "loss_mask": np.ones(n, dtype=bool),
        "behavior_logprobs": np.zeros(n, dtype="f4"),
        "versions": np.array([[0, n]], dtype="i4"),
        "versions_offsets": np.array([0, 1], dtype="i8"),
        "finish_reasons": np.zeros(1, dtype="u1"),
        **ragged_text("text", ["42"]),
    }


REWARD = {
    "rewards": np.ones(1, dtype="f4"),
    "reward_status": np.zeros(1, dtype="u1"),
    "signal/exact": np.ones(1, dtype="f4"),
    "signal_status/exact": np.zeros(1, dtype="u1"),
    **ragged_text("reward_reasons", [""]),
}


@contextmanager
def broker(folder: Path, journal: str, steps: int):
    """A broker of its own process; gives its address."""
    (folder / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 64)
    config = {
        "model": "none",
        "prompts_per_step": STEP,
        "samples_per_prompt": 2,
        "steps": steps,
        "max_staleness": 7,
        "data": {"train": str(folder / "train.jsonl")},
        "reward": {"signals": [{"name": "exact", "function": "exact_match"}]},
        "broker": {"journal": journal, "max_in_flight_groups": 8 * STEP, "heartbeat_s": 30.0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run = folder / "run"
    command = [sys.executable, "-m", "stretto", "serve", "broker", "--config", str(folder / "config.yaml")]
    command += ["--run-folder", str(run), "--log-file", str(folder / "log.jsonl")]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            while not (run / "broker.json").exists():
                if process.poll() is not None:
                    sys.exit("the broker did not start")
                time.sleep(0.01)
            yield json.loads((run / "broker.json").read_text())["address"]
        finally:
            process.kill()


async def carry(address: str, size: int, steps: int) -> float:
    """Seconds for all groups of so many steps to pass through all stages."""
    client = Client(address)
    for service in ("rollout", "reward", "learner"):
        await client.request(Hello(service=service, stage=service, instance=service, host="h", pid=1), Welcome)
    await client.request(Heartbeat(instance="rollout", state="SERVING", version=0), Pulse)
    provided = {"rollout": rollout_columns(size), "reward": REWARD}

    async def lease(stage: str, min_groups: int, most: int) -> list[Any]:
        request = LeaseRequest(instance=stage, stage=stage, max_groups=most, min_groups=min_groups, wait_ms=10_000)
        return (await client.request(request, Leased, wait_s=10.0))[0].leases

    async def work(stage: str) -> None:
        while True:
            leases = await lease(stage, 1, STEP)
            await asyncio.gather(*(complete(stage, group) for group in leases))

    async def complete(stage: str, group: Any) -> None:
        columns = provided[stage]
        if stage == "rollout":
            runs = np.array([[group.min_version, len(columns["tokens"])]], dtype="i4")
            columns = columns | {"versions": runs}
        body = Complete(lease_id=group.lease_id, group_id=group.group_id, attempt=group.attempt)
        await client.request(body, Ok, columns)

    async def learn() -> None:
        for version in range(1, steps + 1):
            leases: list[Any] = []
            while not leases:
                leases = await lease("learner", STEP, STEP)
            ids = [group.group_id for group in leases]
            await client.request(Commit(lineage=0, version=version, group_ids=ids), Ok)
            await client.request(Heartbeat(instance="rollout", state="SERVING", version=version), Pulse)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        workers = [tasks.create_task(work(stage)) for stage in ("rollout", "rollout", "reward", "reward") * 4]
        await learn()
        seconds = time.perf_counter() - started
        for worker in workers:
            worker.cancel()
    await client.close()
    return seconds


def plain_sqlite(folder: Path, size: int, groups: int) -> float:
    """Seconds for so many inserts of one blob, a step's worth in each transaction, with the journal's settings."""
    connection = sqlite3.connect(folder / "plain.sqlite", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("CREATE TABLE blobs (id INTEGER PRIMARY KEY, data BLOB)")
    blob = bytes(size)
    started = time.perf_counter()
    for _ in range(groups // STEP):
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO blobs (data) VALUES (?)", [(blob,)] * STEP)
        connection.execute("COMMIT")
    seconds = time.perf_counter() - started
    connection.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="to carry of each size, at most 5,000 groups")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("| group | way | groups/s | MB/s | µs a group |\n|---|---|---|---|---|")
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for name, size in SIZES.items():
        steps = max(4, min(5000, arguments.megabytes * 1_000_000 // size) // STEP)
        groups = steps * STEP
        figures[name] = {}
        for way in ("plain SQLite", "normal", "off"):
            with tempfile.TemporaryDirectory() as folder:
                if way == "plain SQLite":
                    seconds = plain_sqlite(Path(folder), size, groups)
                else:
                    with broker(Path(folder), way, steps + 100) as address:
                        seconds = uvloop.run(carry(address, size, steps))
            row = {"groups/s": groups / seconds, "MB/s": groups * size / seconds / 1e6, "us": seconds / groups * 1e6}
            figures[name][way] = row
            label = way if way == "plain SQLite" else f"broker, journal {way}"
            print(f"| {name} | {label} | {row['groups/s']:.0f} | {row['MB/s']:.0f} | {row['us']:.0f} |", flush=True)
        ways = figures[name]
        print(
            f"{name}: the journal adds {ways['normal']['us'] - ways['off']['us']:.0f} µs a group; with it the broker "
            f"carries {ways['normal']['MB/s'] / ways['plain SQLite']['MB/s']:.0%} of plain SQLite"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

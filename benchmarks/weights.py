"""The weight path of a model of random parameters in bfloat16: on one host, and over each transport.

    python benchmarks/weights.py [--parameters 135e6] [--rounds 5] [--json PATH]

The learner is this process; broadcaster and rollout are processes of their own, which talk over loopback. Each update
moves every parameter by 1e-6. Times are from the learner's commit until the rollout holds the version, verified; an
engine's own load is not in them (benchmarks/engine.py measures it). The bare broadcast is torch.distributed's of one
tensor of the same size between two processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import secrets
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from protocol.channel import Server
from protocol.messages import Transport
from services.broadcaster.service import Broadcaster
from services.learner.slots import Slots
from services.rollout.snapshots import Snapshots
from shared.config import Weights
from shared.log import configure_logging
from shared.snapshot import PREFIX, Layout, SnapshotFile

BUCKET_BYTES = Weights().bucket_mib << 20
LEARNING_RATE = 1e-6
SPAWN = multiprocessing.get_context("spawn")
WAYS: list[tuple[str, Transport, bool]] = [
    ("gloo", "gloo", False),
    ("gloo, deltas", "gloo", True),
    ("stream", "stream", False),
    ("stream, deltas", "stream", True),
]


def best_s(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the quickest of some rounds."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class Learner:
    """Float32 masters and the snapshots made of them."""

    def __init__(self, parameters: float) -> None:
        rows = int(parameters / 200 / 576)
        self.layout = Layout.of({f"layer{i}.weight": (rows, 576) for i in range(200)}, "bfloat16")
        self.masters = {name: torch.randn(shape) * 0.02 for name, (_, shape, _) in self.layout.tensors.items()}

    def write(self, tensors: dict[str, torch.Tensor]) -> None:
        """The snapshot: cast all masters."""
        for name, tensor in tensors.items():
            tensor.copy_(self.masters[name])

    def update(self) -> None:
        """One optimizer step."""
        for master in self.masters.values():
            master.add_(torch.randn_like(master).sign_(), alpha=LEARNING_RATE)

    async def publish(self, slots: Slots, version: int) -> float:
        """Write and publish a version; returns when it was committed."""
        self.write(await slots.acquire(0, version))
        manifest = slots.manifest([0, 1], [0.0])
        committed = time.monotonic()
        assert await slots.publish(0, version, manifest)
        return committed


def one_host(learner: Learner, rounds: int) -> dict[str, float]:
    """Copies, checksums and a swap in place."""
    size = learner.layout.size_bytes / 1e9
    file = SnapshotFile.create(f"{PREFIX}{secrets.token_hex(8)}", learner.layout, 2)
    casts = {name: master.bfloat16() for name, master in learner.masters.items()}
    copies = {name: torch.empty_like(cast) for name, cast in casts.items()}

    def copy(source: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        for name, tensor in into.items():
            tensor.copy_(source[name])

    plain_s = best_s(lambda: copy(casts, copies), rounds)
    plain_cast_s = best_s(lambda: copy(learner.masters, copies), rounds)
    shared_s = best_s(lambda: copy(casts, file.tensors(1)), rounds)
    snapshot_s = best_s(lambda: learner.write(file.tensors(1)), rounds)
    checksum_s = best_s(lambda: file.checksums(1, BUCKET_BYTES), rounds)
    linear = torch.nn.ParameterDict({name.replace(".", "_"): torch.nn.Parameter(c) for name, c in casts.items()})
    slots = [{n.replace(".", "_"): t for n, t in file.tensors(slot).items()} for slot in (0, 1)]

    def swap() -> None:
        slots.reverse()
        for name, tensor in slots[0].items():
            linear._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)

    swap_s = best_s(swap, rounds)
    file.unlink()
    return {
        "plain copy, GB/s": size / plain_s,
        "copy into shared memory, GB/s": size / shared_s,
        "shm / plain copy": plain_s / shared_s,
        "snapshot / plain cast": plain_cast_s / snapshot_s,
        "the learner's pause: snapshot, ms": snapshot_s * 1e3,
        "checksums, ms": checksum_s * 1e3,
        "swap in place, ms": swap_s * 1e3,
    }


def bare_member(rank: int, port: int, size_bytes: int, rounds: int, told: Connection | None) -> None:
    """One end of a bare broadcast."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tensor = torch.ones(size_bytes, dtype=torch.uint8)

    def broadcast() -> None:
        dist.broadcast(tensor, 0)

    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        seconds.append(best_s(broadcast, 1))
    if told:
        told.send(seconds[1:])
    dist.destroy_process_group()


def bare_broadcast_s(size_bytes: int, rounds: int) -> list[float]:
    """Seconds of each bare broadcast, at the receiver."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    port = store.port
    del store
    hears, tells = SPAWN.Pipe(duplex=False)
    members = [
        SPAWN.Process(target=bare_member, args=(rank, port, size_bytes, rounds, tells if rank else None))
        for rank in range(2)
    ]
    for member in members:
        member.start()
    seconds: list[float] = hears.recv()
    for member in members:
        member.join()
    return seconds


def broadcaster(deltas: bool, told: Connection) -> None:
    """The broadcaster's process."""
    configure_logging("broadcaster", "broadcaster", Path("/dev/null"))

    async def serve() -> None:
        service = Broadcaster(Weights(deltas=deltas))
        server = Server("tcp://127.0.0.1:0", service.handle)
        told.send(server.address)
        await asyncio.gather(server.run(), service.rounds.run())

    asyncio.run(serve())


def rollout(address: str, transport: Transport, told: Connection) -> None:
    """A rollout's process, without an engine: tells when it held which version, and what came for it."""
    configure_logging("rollout", "rollout", Path("/dev/null"))
    torch.set_num_threads(1)

    async def follow() -> None:
        snapshots = Snapshots(address, "rollout", Weights(transport=transport), patience_s=60.0)
        while True:
            if found := await snapshots.next():
                snapshots.in_use = found
                figures = snapshots.figures
                told.send((time.monotonic(), figures["weights/receive_s"], figures["weights/received_mib"]))

    asyncio.run(follow())


async def over(learner: Learner, transport: Transport, deltas: bool, rounds: int) -> dict[str, float]:
    """Median figures of some versions; the first two, for which memory and a group are made, are left out."""
    hears_address, tells_address = SPAWN.Pipe(duplex=False)
    hears, tells = SPAWN.Pipe(duplex=False)
    service = SPAWN.Process(target=broadcaster, args=(deltas, tells_address), daemon=True)
    service.start()
    address = hears_address.recv()
    follower = SPAWN.Process(target=rollout, args=(address, transport, tells), daemon=True)
    follower.start()
    slots = Slots(address, "benchmark", learner.layout, Weights(), patience_s=60.0)
    told: list[Any] = []
    for version in range(rounds + 2):
        learner.update()
        committed = await learner.publish(slots, version)
        at, receive_s, mib = await asyncio.to_thread(hears.recv)
        told.append((at - committed, receive_s, mib))
    await slots.close()
    for process in (follower, service):
        process.kill()
        process.join()
    held_s, receive_s, mib = (statistics.median(column) for column in zip(*told[2:], strict=True))
    return {"commit to held, s": held_s, "receive, s": receive_s, "MiB": mib}


def main() -> None:
    """Print tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=135e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    learner = Learner(args.parameters)
    here = one_host(learner, args.rounds)
    size_mib = learner.layout.size_bytes / 2**20
    print(f"{size_mib:.0f} MiB a snapshot")
    for name, value in here.items():
        print(f"{name:36} {value:10.3f}")
    bare = bare_broadcast_s(learner.layout.size_bytes, args.rounds)
    figures: dict[str, Any] = {"MiB": size_mib, "one host": here, "bare broadcast, s": bare}
    best = f"{size_mib / min(bare):.0f} MiB/s"
    print(f"\nbare gloo broadcast: {statistics.median(bare):.3f} s, at best {min(bare):.3f} s ({best})\n")
    print("| transport | commit to held, s | MiB sent | of it receiving, s | MiB/s of weights | of bare broadcast |")
    print("|---|---|---|---|---|---|")
    for label, transport, deltas in WAYS:
        found = asyncio.run(over(learner, transport, deltas, args.rounds))
        ratio = statistics.median(bare) / found["receive, s"]
        figures[label] = found | {"of bare broadcast": ratio}
        print(
            f"| {label} | {found['commit to held, s']:.3f} | {found['MiB']:.1f} | {found['receive, s']:.3f} "
            f"| {size_mib / found['receive, s']:.0f} | {ratio:.0%} |",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

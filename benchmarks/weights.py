"""The weight path on one host: snapshot, checksums and swap of a model of 135M random parameters in bfloat16.

python benchmarks/weights.py [--parameters 135e6] [--rounds 7] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shared.snapshot import Layout, SnapshotFile

BUCKET_BYTES = 16 << 20


def best_s(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the quickest of some rounds."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    """Print a table and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=135e6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = int(args.parameters / 200 / 576)
    layout = Layout.of({f"layer{i}.weight": (rows, 576) for i in range(200)}, "bfloat16")
    file = SnapshotFile.create("stretto-benchmark", layout, 3)
    try:
        masters = {name: torch.randn(shape) for name, (_, shape, _) in layout.tensors.items()}
        casts = {name: master.bfloat16() for name, master in masters.items()}
        copies = {name: torch.empty_like(cast) for name, cast in casts.items()}

        def write(into: dict[str, torch.Tensor], source: dict[str, torch.Tensor]) -> None:
            for name, tensor in into.items():
                tensor.copy_(source[name])

        gigabytes = sum(cast.nbytes for cast in casts.values()) / 1e9
        plain_s = best_s(lambda: write(copies, casts), args.rounds)
        plain_cast_s = best_s(lambda: write(copies, masters), args.rounds)
        snapshot_s = best_s(lambda: write(file.tensors(1), masters), args.rounds)
        checksum_s = best_s(lambda: file.checksums(1, BUCKET_BYTES), args.rounds)
        linear = torch.nn.ParameterDict({name.replace(".", "_"): torch.nn.Parameter(c) for name, c in casts.items()})
        slots = [{n.replace(".", "_"): t for n, t in file.tensors(slot).items()} for slot in (0, 1)]

        def point(turn: list[int]) -> None:
            turn[0] ^= 1
            for name, tensor in slots[turn[0]].items():
                linear._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)

        turn = [0]
        swap_s = best_s(lambda: point(turn), args.rounds)
    finally:
        file.unlink()
    figures = {
        "size_gb": gigabytes,
        "plain_copy_gb_per_s": gigabytes / plain_s,
        "plain_cast_gb_per_s": gigabytes / plain_cast_s,
        "snapshot_gb_per_s": gigabytes / snapshot_s,
        "snapshot / plain_cast": plain_cast_s / snapshot_s,
        "checksum_gb_per_s": gigabytes / checksum_s,
        "snapshot_ms": snapshot_s * 1e3,
        "checksum_ms": checksum_s * 1e3,
        "swap_ms": swap_s * 1e3,
    }
    for name, value in figures.items():
        print(f"{name:24} {value:10.3f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

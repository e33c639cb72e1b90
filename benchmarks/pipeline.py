"""Throughput of the whole pipeline on the arithmetic example's work: 8 prompts × 8 samples × 8 new tokens an update.

Every sample has 8 new tokens and every group is trained on, so that figures compare with trainers that end no sample
early and leave no group out. Runs the pipeline asynchronously (max_staleness 1) and synchronously (0), in alternation.

    python benchmarks/pipeline.py [--model smollm2-135m] [--steps 14] [--rounds 1] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WARM_UP = 3
"""Updates left out at the start: memory is touched for the first time."""


def run(model: str, steps: int, staleness: int) -> dict[str, float]:
    """One run of the pipeline; figures from its steps after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = {
            "model": model,
            "folder": folder,
            "steps": steps,
            "max_staleness": staleness,
            "sampling": "{max_tokens: 8, ignore_eos: true}",
            "reward.signals": "[{name: noise, function: benchmarks/noise.py:noise}]",
            "data.heldout": "null",
            "checkpoint.every": steps + 1,
            "broker.heartbeat_s": 0.5,
        }
        command = [sys.executable, "-m", "stretto", "train", "examples/arithmetic/config.yaml", "--plain"]
        subprocess.run(
            [*command, *(f"{name}={value}" for name, value in overrides.items())],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return figures_of(Path(folder) / "arithmetic", WARM_UP)


def figures_of(run_folder: Path, warm_up: int) -> dict[str, float]:
    """Figures of a run that has ended, from its steps after the first few."""
    report: dict[str, Any] = json.loads((run_folder / "report.json").read_text())
    metrics = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()][warm_up:]
    elapsed = metrics[-1]["time"] - metrics[0]["time"]
    sequences_per_s = sum(m["train/samples"] for m in metrics[1:]) / elapsed
    memory = {name: mib for name, mib in report["peak_memory_mib"].items() if mib is not None}
    return {
        "sequences_per_s": sequences_per_s,
        "generated_tokens_per_s": sum(m["train/tokens"] for m in metrics[1:]) / elapsed,
        "step_s": elapsed / (len(metrics) - 1),
        "learner_update_s": statistics.median(m["time/update_s"] for m in metrics),
        "overlap_ratio": report["overlap_ratio"],
        "peak_memory_mib": sum(memory.values()),
        **{f"peak_memory_mib/{name}": mib for name, mib in memory.items()},
    }


def main() -> None:
    """Print a table and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder or short name")
    parser.add_argument("--steps", type=int, default=14, help="updates of each run")
    parser.add_argument("--rounds", type=int, default=1, help="how often both are run")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"asynchronous": [], "synchronous": []}
    for _ in range(args.rounds):
        for (name, found), staleness in zip(runs.items(), (1, 0), strict=True):
            print(f"running {name} …", file=sys.stderr, flush=True)
            found.append(run(args.model, args.steps, staleness))
    best = {name: max(found, key=lambda figures: figures["sequences_per_s"]) for name, found in runs.items()}
    print(f"{'':30} {'asynchronous':>14} {'synchronous':>14}")
    for figure in best["asynchronous"]:
        print(f"{figure:30} {best['asynchronous'][figure]:14.2f} {best['synchronous'][figure]:14.2f}")
    ratio = best["asynchronous"]["sequences_per_s"] / best["synchronous"]["sequences_per_s"]
    print(f"asynchronous / synchronous: {ratio:.2f}")
    if args.json:
        args.json.write_text(json.dumps({**best, "ratio": ratio}, indent=1))


if __name__ == "__main__":
    main()

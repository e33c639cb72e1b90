"""The runs that benchmarks/algorithms.py makes: what each trains with, and what is kept of it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
STEPS = 120
TIMEOUT_S = 400.0
LR = 1e-3
STALENESS = (0, 1, 2, 4, 8)
CORRECTIONS = ("none", "tis", "decoupled", "mask")
THRESHOLD = 0.25
"""Mean cost that safe_rlhf allows: share of an answer that is the prompt's first letter."""
KEPT = (
    "reward/mean",
    "staleness/mean",
    "entropy",
    "kl",
    "clip_fraction",
    "ratio/beyond_cap",
    "critic/explained_variance",
    "cost/mean",
    "algorithm/multiplier",
)
"""Metrics of each version that are kept of a run."""

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "dapo": {},
    "gspo": {},
    "cispo": {},
    "rloo": {},
    "reinforce_pp": {},
    "ppo": {},
    "remax": {},
    "safe_rlhf": {},
}
"""What a preset needs beside the common config."""

UPPER = {"name": "upper", "function": "benchmarks/letters.py:upper"}
REWARD = {"signals": [UPPER]}
TEMPTING = {
    "signals": [UPPER | {"weight": 0.6}, {"name": "bonus", "function": "benchmarks/letters.py:first", "weight": 0.4}]
}
"""The reward of the runs with a cost: 1 where all letters are the first one of the prompt, and so is the cost."""
COST = {"signals": [{"name": "first", "function": "benchmarks/letters.py:first"}]}
SLOW = {"signals": [UPPER | {"function": "benchmarks/letters.py:slow_upper", "args": {"delay_s": 0.15}}]}
"""64 samples at once, 0.15 s each: the slowest part of a run, so that all groups that may wait for it do."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. changes: to the common config, by section."""

    part: str
    name: str
    seed: int
    changes: dict[str, Any] = field(hash=False)

    @property
    def key(self) -> str:
        """Names it in the JSON file."""
        return f"{self.part}/{self.name}/{self.seed}"


def cells(part: str, seeds: int, presets: list[str]) -> list[Cell]:
    """The runs of a part: `presets`, `staleness` or `safe`."""
    found: dict[str, dict[str, Any]] = {}
    if part == "presets":
        found = {name: {"algorithm": {"name": name}} | PRESETS[name] for name in presets if name != "safe_rlhf"}
    elif part == "safe":
        safe = {"name": "safe_rlhf", "threshold": THRESHOLD} | PRESETS["safe_rlhf"]
        found = {
            "ppo": {"algorithm": {"name": "ppo"}, "reward": TEMPTING},
            "safe_rlhf": {"algorithm": safe, "reward": TEMPTING, "cost": COST},
        }
    elif part == "staleness":
        found = {
            f"{staleness}-{correction}": {
                "algorithm": {"name": "grpo", "correction": correction},
                "max_staleness": staleness,
                "learner": {"updates": 2},
                "reward": SLOW,
            }
            for staleness in STALENESS
            for correction in CORRECTIONS
        }
    return [Cell(part, name, seed, changes) for seed in range(seeds) for name, changes in found.items()]


def config(cell: Cell, task: Path, folder: Path) -> dict[str, Any]:
    """The config of a run on the task in a folder."""
    common: dict[str, Any] = {
        "name": "run",
        "folder": str(folder),
        "seed": cell.seed,
        "model": str(task / "model"),
        "prompts_per_step": 8,
        "samples_per_prompt": 8,
        "steps": STEPS,
        "data": {"train": str(task / "train.jsonl"), "heldout": str(task / "heldout.jsonl")},
        "sampling": {"max_tokens": 12},
        "rollout": {"dtype": "float32", "max_samples": 128},
        "reward": REWARD,
        "learner": {"dtype": "float32", "lr": LR},
        "reference": {"dtype": "float32"},
        "critic": {"dtype": "float32", "lr": LR},
        "evaluation": {"every": 10, "prompts": 40},
        "checkpoint": {"every": STEPS},
        "broker": {"heartbeat_s": 0.5},
        "cores": "shared",
    }
    for name, change in cell.changes.items():
        old = common.get(name)
        common[name] = old | change if isinstance(old, dict) and isinstance(change, dict) else change
    return common


def run(cell: Cell, task: Path) -> dict[str, Any]:
    """Train as `stretto train` does; what is kept of the run, or {"failed": why}."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config(cell, task, Path(folder))))
        process = subprocess.Popen(
            [sys.executable, "-m", "stretto", "train", str(file), "--plain"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {"failed": f"not done in {TIMEOUT_S:g} s"}
        if process.returncode != 0:
            return {"failed": " ".join(errors.split())[-500:]}
        return _kept(Path(folder) / "run") | {"seconds": round(time.monotonic() - began, 1)}


def _kept(folder: Path) -> dict[str, Any]:
    """Curves of a run, and the held-out rewards of each prompt at its start and its end."""
    metrics = _read(folder / "metrics.jsonl")
    evaluations = _read(folder / "evaluations.jsonl")
    samples = _read(folder / "samples.jsonl")
    heldout: dict[int, dict[int, float]] = {0: {}, STEPS: {}}
    for group in samples:
        if group["lane"] == "eval" and group["version"] in heldout:
            heldout[group["version"]][group["row"]] = group["rewards"][0]
    start, end = heldout.values()
    if not start or start.keys() != end.keys():
        return {"failed": "the held-out prompts were not all evaluated at the start and the end"}
    kept = {name: [_short(record.get(name)) for record in metrics] for name in KEPT}
    if "bonus" in evaluations[0]["signals"]:  # what the cost is where it is bounded
        kept["bonus"] = [_mean_bonus(samples, record["version"]) for record in metrics]
    return {
        "evaluations": [[e["version"], _short(e["reward"])] for e in evaluations],
        "start": [start[row] for row in sorted(start)],
        "end": [end[row] for row in sorted(start)],
        "metrics": {name: values for name, values in kept.items() if any(v is not None for v in values)},
    }


def _mean_bonus(samples: list[dict[str, Any]], version: int) -> float | None:
    groups = [group for group in samples if group["lane"] == "train" and group["version"] == version]
    values = [value for group in groups for value in group["signals"]["bonus"]]
    return _short(sum(values) / len(values)) if values else None


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]

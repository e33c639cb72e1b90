"""Runs of the whole pipeline: real processes, real sockets, the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class Workplace:
    """A folder with a config, and the command line in it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(6) for b in range(6)]
        for name, part in (("train", rows[:30]), ("heldout", rows[30:])):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        (folder / "rewards.py").write_text("def digits(completion):\n    return sum(c.isdigit() for c in completion)\n")
        self.config = {
            "name": "tiny",
            "folder": str(folder / "runs"),
            "model": str(model),
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "steps": 4,
            "max_staleness": 1,
            "data": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")},
            "sampling": {"max_tokens": 6},
            "rollout": {"dtype": "float32", "max_samples": 16},
            "learner": {"dtype": "float32", "lr": 1e-3},
            "reward": {
                "signals": [
                    {"name": "exact", "function": "exact_match"},
                    {"name": "digits", "function": f"{folder}/rewards.py:digits", "weight": 0.1},
                ]
            },
            "evaluation": {"every": 2, "prompts": 6},
            "broker": {"heartbeat_s": 0.5},
            "cores": "shared",
        }

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "tiny"

    def write(self, **changes) -> Path:
        file = self.folder / "config.yaml"
        file.write_text(yaml.safe_dump(self.config | changes))
        return file

    def stretto(self, *arguments: str, timeout: float = 280) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "stretto", *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
        )


@pytest.fixture
def workplace(tmp_path, tiny_model, monkeypatch) -> Workplace:
    """Its snapshots lie in a folder of its own, since other runs of the same name may go on on this machine."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("STRETTO_SHM", str(tmp_path / "shm"))
    return Workplace(tmp_path, tiny_model)

"""Several ranks that share a policy make the updates of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from services.learner.crew import Crew

ROOT = Path(__file__).parents[3]
FIGURES = ("loss", "grad_norm", "kl", "entropy", "drift/mean", "drift/max", "ratio/max", "lr")


def train(ranks: int, model: Path, folder: Path, **settings) -> dict:
    """What `ranks` ranks make of the same steps, with the weights they end with."""
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    script = [str(Path(__file__).with_name("ranks.py")), str(model), str(folder), json.dumps(settings)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launcher, *script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "steps.json").read_text()) | {"weights": torch.load(folder / "weights.pt")}


def agree(one: dict, other: dict) -> None:
    for step, expected in zip(other["steps"], one["steps"], strict=True):
        for name in FIGURES:
            assert step[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
        np.testing.assert_allclose(step["scores"], expected["scores"], atol=1e-4)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], weight, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_make_the_updates_of_one(tiny_model, tmp_path, ranks):
    learner = {"dtype": "float32", "lr": 1e-3, "tokens_per_micro_batch": 40, "updates": 2}
    settings = {"learner": learner, "algorithm": {"name": "grpo", "correction": "decoupled"}, "seeds": [1, 2, 3]}
    one, several = (train(n, tiny_model, tmp_path / str(n), **settings) for n in (1, ranks))
    agree(one, several)


def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_three(tiny_model, tmp_path):
    learner = {"dtype": "float32", "lr": 1e-3, "tokens_per_micro_batch": 40}
    first = train(2, tiny_model, tmp_path / "first", learner=learner, seeds=[1, 2])
    assert first["version"] == 2
    then = {"learner": learner, "seeds": [3, 4], "checkpoint": first["checkpoint"]}
    one, three = (train(n, tiny_model, tmp_path / f"then-{n}", **then) for n in (1, 3))
    whole = train(1, tiny_model, tmp_path / "whole", learner=learner, seeds=[1, 2, 3, 4])
    agree(one, three)
    assert one["version"] == 4
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(one["weights"][name], weight, atol=2e-5, rtol=1e-4)


def test_ranks_share_a_frozen_model_with_an_adapter(tiny_model, tmp_path):
    learner = {"dtype": "float32", "lr": 1e-2, "tokens_per_micro_batch": 40, "lora": {"rank": 3}}
    one, two = (train(n, tiny_model, tmp_path / str(n), learner=learner, seeds=[1, 2]) for n in (1, 2))
    agree(one, two)
    assert one["steps"][1]["grad_norm"] > 0
    then = {"learner": learner | {"dtype": "bfloat16"}, "seeds": [3], "checkpoint": two["checkpoint"]}
    assert train(2, tiny_model, tmp_path / "then", **then)["version"] == 3


def test_work_is_shared_out_evenly_and_every_part_has_one_length():
    work, weight = list("abcdefg"), [9, 1, 1, 5, 4, 3, 1]
    parts = [Crew(rank, 3).share(work, weight) for rank in range(3)]
    assert {len(part) for part in parts} == {max(map(len, parts))}
    assert sorted(piece for part in parts for piece in part if piece is not None) == work
    loads = [sum(weight[work.index(piece)] for piece in part if piece is not None) for part in parts]
    assert sorted(loads) == [7, 8, 9]


def test_alone_there_is_nobody_to_share_with():
    crew = Crew()
    assert crew.share([3, 1, 2], [1, 1, 1]) == [3, 1, 2]
    assert crew.gather({"a": 1.0}) == [{"a": 1.0}]

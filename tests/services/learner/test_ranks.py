"""Several ranks that share a policy make the updates of one."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from services.learner.crew import Crew
from services.learner.rank import Rank, follow
from shared.errors import OutOfMemory

from ..compute.test_packing import group_of

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


@pytest.mark.parametrize(("ranks", "copies", "sync_once"), [(2, 1, True), (4, 2, False)])
def test_ranks_make_the_updates_of_one(tiny_model, tmp_path, ranks, copies, sync_once):
    learner = {"dtype": "float32", "lr": 1e-3, "eps": 1e-6, "tokens_per_micro_batch": 20, "updates": 2}
    settings = {"algorithm": {"name": "grpo", "correction": "decoupled"}, "seeds": [1, 2, 3]}
    one = train(1, tiny_model, tmp_path / "one", learner=learner, **settings)
    learner |= {"ranks": ranks, "copies": copies, "sync_once": sync_once}
    several = train(ranks, tiny_model, tmp_path / "several", learner=learner, **settings)
    agree(one, several)
    assert several["own_weights"] == pytest.approx(one["own_weights"] * copies / ranks, rel=0.01)
    units, optimizer_steps = 3, 2  # two layers and what is outside of them
    for step in several["steps"]:
        assert (step["reductions"] == units * optimizer_steps) == sync_once, step["reductions"]


def test_micro_batches_of_ranks_are_as_many_and_hold_like_many_tokens(new_trainer):
    random = np.random.default_rng(0)
    groups = [group_of(int(random.integers(10, 80)), random.integers(1, 200, 8).tolist(), i) for i in range(32)]
    for ranks, max_tokens in itertools.product((2, 3, 4, 8), (400, 2000, 10**6)):
        trainer = new_trainer(learner={"dtype": "float32", "tokens_per_micro_batch": max_tokens})
        parts = []
        for rank in range(ranks):
            trainer._crew = Crew(rank, ranks)
            parts.append(trainer._rows(groups))
        assert len({len(part) for part in parts}) == 1
        rows = [[row for batch in part if batch for row in batch] for part in parts]
        placed = sorted((id(row.group), i) for part in rows for row in part for i in row.samples)
        assert placed == sorted((id(group), i) for group in groups for i in range(8))
        loads = [sum(row.length for row in part) for part in rows]
        assert max(loads) < 1.1 * np.mean(loads), (ranks, max_tokens, loads)


def test_one_group_is_enough_for_all_ranks(new_trainer):
    trainer = new_trainer()
    for rank in range(4):
        trainer._crew = Crew(rank, 4)
        assert all(batch is not None for batch in trainer._rows([group_of(3, [40] * 8)]))


def test_a_rank_without_memory_ends_though_it_is_not_the_first():
    """The others wait for it: torchrun ends them when it ends."""

    class Told(Crew):
        def orders(self):
            yield "score", [], {"tokens": [1]}

    def score(rank, columns, tokens) -> None:
        raise OutOfMemory("the learner ran out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rank, "score", score)
        with pytest.raises(OutOfMemory):
            follow(Told(1, 2))


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


def test_work_is_shared_out_evenly():
    work, weight = list("abcdefg"), [9, 1, 1, 5, 4, 3, 1]
    parts = Crew(0, 3).share(work, weight)
    assert parts == Crew(2, 3).share(work, weight)
    assert sorted(piece for part in parts for piece in part) == work
    assert sorted(sum(weight[work.index(piece)] for piece in part) for part in parts) == [7, 8, 9]


def test_alone_there_is_nobody_to_share_with():
    crew = Crew()
    assert crew.share([3, 1, 2], [1, 1, 1]) == [[3, 1, 2]]
    assert crew.gather({"a": 1.0}) == [{"a": 1.0}]

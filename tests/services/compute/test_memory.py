"""A micro-batch that does not fit into memory: computed in halves to the same end, or named with what would help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from services.compute.hf import HFModel
from services.compute.inference import number_tokens
from services.compute.memory import Room
from services.compute.packing import halve, micro_batches
from shared.config import Critic, Learner, Reference
from shared.errors import OutOfMemory

from ..conftest import gradient_of_step, make_group
from ..critic.test_trainer import lesson, new_critic
from .test_packing import group_of

ROOT = Path(__file__).parents[3]
ON_CPU = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
SHORTAGES = [RuntimeError(ON_CPU), MemoryError("std::bad_alloc"), torch.OutOfMemoryError("CUDA out of memory.")]


@pytest.fixture
def shortage(monkeypatch):
    """Memory for micro-batches of at most so many samples: the forward pass of a larger one fails."""

    def begin(samples: int, error: Exception = SHORTAGES[0], *, in_backward: bool = False) -> list[int]:
        failed = []
        hidden = HFModel.hidden

        def fail(*_) -> None:
            raise error

        def limited(self, rows):
            if rows.n_samples <= samples:
                return hidden(self, rows)
            failed.append(rows.n_samples)
            if not in_backward:
                fail()
            first = self._model.model.layers[0]  # when the gradient gets there, later layers have theirs
            with first.register_forward_hook(lambda module, given, made: made.register_hook(fail) and None):
                return hidden(self, rows)

        monkeypatch.setattr(HFModel, "hidden", limited)
        return failed

    return begin


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_a_step_in_halves_has_the_same_loss_and_gradient(new_trainer, shortage, error, in_backward):
    groups = [make_group(seed) for seed in range(3)]
    learner = {"dtype": "float32", "lr": 1e-3, "tokens_per_micro_batch": 60}
    whole, halved = new_trainer(learner=learner), new_trainer(learner=learner)
    expected, metrics = gradient_of_step(whole, groups), new_trainer(learner=learner).step(groups)
    failed = shortage(6, error, in_backward=in_backward)
    torch.testing.assert_close(gradient_of_step(halved, groups), expected, atol=1e-6, rtol=1e-6)
    assert failed
    n, again = len(failed), new_trainer(learner=learner).step(groups)
    assert again["memory/halved"] == len(failed) - n > metrics["memory/halved"] == 0
    for name in {"loss", "grad_norm", "kl", "entropy", "drift/mean", "drift/fresh/tokens", "ratio/max"}:
        assert again[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-6), name


def test_a_critic_learns_the_same_in_halves(tiny_model, shortage):
    lessons = [lesson(seed) for seed in range(3)]
    whole, halved = new_critic(tiny_model), new_critic(tiny_model)
    expected = whole.learn(lessons)
    failed = shortage(8)
    assert halved.learn(lessons) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert failed == [12]
    for name, parameter in whole.backend.parameters.items():
        torch.testing.assert_close(halved.backend.parameters[name], parameter, atol=1e-6, rtol=1e-6)


def test_the_numbers_of_a_frozen_model_are_the_same_in_halves(backend, shortage):
    groups = [make_group(seed).columns for seed in range(2)]
    room = Room("reference", Reference())
    expected = number_tokens(lambda rows: backend.logprobs(rows, 1.0)[0], groups, room)
    failed = shortage(4)
    for part, whole in zip(
        number_tokens(lambda rows: backend.logprobs(rows, 1.0)[0], groups, room), expected, strict=True
    ):
        np.testing.assert_allclose(part, whole, atol=1e-6)
    assert failed == [8] and room.halved == 1


def test_what_does_not_fit_in_halves_either_is_named_with_what_would_help(new_trainer, shortage):
    failed = shortage(1)
    learner = {"dtype": "float32", "lr": 1e-3, "tokens_per_micro_batch": 500}
    with pytest.raises(OutOfMemory) as raised:
        new_trainer(learner=learner).step([make_group(seed) for seed in range(3)])
    assert failed == [12, 8]
    text = str(raised.value)
    assert re.match(
        r"the learner ran out of memory on cpu \(\d+ MiB at most\) in half of a micro-batch of 3 × \d+ tokens: "
        r"\[enforce fail\] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes\.",
        text,
    )
    helps = (
        "learner.tokens_per_micro_batch below 500, learner.gradient_checkpointing: true, learner.dtype: bfloat16, "
        "learner.ranks above 1 on more devices, a device with more memory"
    )
    assert f"What helps, in this order: {helps}" in text


def failing(_) -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("room", "lengths", "what", "helps"),
    [
        (
            Room("cost_critic", Critic(gradient_checkpointing=True)),
            [5],
            "the cost_critic ran out of memory on cpu",
            "in this order: a smaller sampling.max_tokens, a device",
        ),
        (
            Room("reference", Reference(tokens_per_micro_batch=77, halve_on_oom=False)),
            [5, 6],
            "in a micro-batch of 1 × 15 tokens: ",
            "in this order: reference.tokens_per_micro_batch below 77, a device",
        ),
        (
            Room("learner", Learner(), rank=1, ranks=2),
            [5, 6],
            "the learner (rank 1 of 2) ran out of memory",
            "learner.tokens_per_micro_batch below 8192, learner.gradient_checkpointing: true, learner.ranks above 2",
        ),
    ],
)
def test_one_sample_and_ranks_that_share_a_model_are_not_halved(room, lengths, what, helps):
    (rows,) = micro_batches([group_of(6, lengths)], 1000)
    with pytest.raises(OutOfMemory) as raised:
        room.compute(rows, failing)
    assert what in str(raised.value) and helps in str(raised.value)
    assert room.halved == 0


def test_an_error_of_another_kind_stays_what_it_is():
    (rows,) = micro_batches([group_of(6, [5, 6])], 1000)
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    def work(_) -> None:
        raise error

    with pytest.raises(RuntimeError) as raised:
        Room("learner", Learner()).compute(rows, work)
    assert raised.value is error


def test_an_optimizer_without_memory_is_named():
    room, helps = Room("learner", Learner()), r"in the optimizer's step: .*in this order: learner\.ranks above 1"
    with pytest.raises(OutOfMemory, match=helps), room.during("the optimizer's step"):
        raise MemoryError("std::bad_alloc")


def test_halves_hold_every_sample_once():
    groups = [group_of(6, [5, 6, 3], i) for i in range(3)]
    (rows,) = micro_batches(groups, 1000)
    for whole in rows, rows[:1]:
        placed = [(row.group, i) for half in halve(whole) for row in half for i in row.samples]
        assert len(halve(whole)) == 2 and placed == [(row.group, i) for row in whole for i in row.samples]
    assert halve(micro_batches([group_of(6, [5])], 1000)[0]) == []


def test_a_real_shortage_on_a_cpu_is_met_by_halves_and_a_worse_one_is_named(tiny_model):
    """A child limits its address space, after a first step, to some MiB more than it has."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, str(Path(__file__).with_name("limited.py")), str(tiny_model)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    halved, named = (line for line in done.stdout.splitlines() if "[warning" not in line)
    assert halved == "1.0"
    assert re.match(r"the learner ran out of memory on cpu \(\d+ MiB at most\) in half of a micro-batch of 1 × ", named)

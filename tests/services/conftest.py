"""Groups and backends for the tests of the learner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.compute.hf import HFBackend
from services.learner.trainer import Trainer
from shared.algorithms import Algorithm
from shared.algorithms.grpo import GRPO
from shared.config import RunConfig, parse_config
from shared.group import Prompt, RewardStatus, TrajectoryGroup, ragged


def make_config(model: Path | str = "none", **changes) -> RunConfig:
    tree = {
        "model": str(model),
        "steps": 10,
        "prompts_per_step": 3,
        "samples_per_prompt": 4,
        "data": {"train": "none"},
        "sampling": {"max_tokens": 12},
        "reward": {"signals": [{"name": "s", "function": "exact_match"}]},
        "learner": {"dtype": "float32", "lr": 1e-3},
        "rollout": {"dtype": "float32"},
    }
    return parse_config(tree | changes)


def make_group(seed: int, n: int = 4, rewards=None, versions: int = 0, prompt: int | None = None) -> TrajectoryGroup:
    """A group of random tokens and lengths, as a rollout and a reward stage would make it."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 9, n)
    columns = ragged("tokens", [random.integers(0, 256, length) for length in lengths], "i4")
    total = int(lengths.sum())
    columns |= {
        "prompt_tokens": random.integers(0, 256, prompt or int(random.integers(2, 12))).astype("i4"),
        "behavior_logprobs": -random.random(total).astype("f4") * 6,
        "loss_mask": np.ones(total, dtype=bool),
        "versions": np.stack([np.full(n, versions), lengths], axis=1).astype("i4"),
        "versions_offsets": np.arange(n + 1),
        "finish_reasons": np.zeros(n, dtype="u1"),
        "rewards": np.asarray(random.random(n) if rewards is None else rewards, dtype="f4"),
        "reward_status": np.full(n, RewardStatus.OK, dtype="u1"),
    }
    return TrajectoryGroup(f"g{seed}", "train", Prompt(seed, 0, "p"), 0, columns)


@pytest.fixture
def backend(tiny_model) -> HFBackend:
    torch.manual_seed(0)
    return HFBackend.load(str(tiny_model), make_config().learner)


@pytest.fixture
def new_trainer(tiny_model):
    """Makes trainers of the tiny model, all with the same weights."""

    def make(algorithm: Algorithm | None = None, **changes) -> Trainer:
        config = make_config(tiny_model, **changes)
        backend = HFBackend.load(str(tiny_model), config.learner)
        return Trainer(config, backend, algorithm or GRPO(), total_steps=10)

    return make

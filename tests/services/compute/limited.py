"""Two long steps of the tiny model, each with so much more memory than the process has: enough for halves, and less.

python tests/services/compute/limited.py MODEL
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from services.compute.hf import HFBackend
from services.learner.trainer import Trainer
from shared.algorithms.grpo import GRPO
from shared.errors import OutOfMemory
from shared.group import TrajectoryGroup
from tests.services.conftest import make_config, make_group

LENGTH = 3000
"""Tokens of each of two samples: the masks and scores of a row of both take four times those of a row of one."""


def long_group() -> TrajectoryGroup:
    group = make_group(1, n=2, rewards=[0.0, 1.0], prompt=8)
    group.columns |= {
        "tokens": np.random.default_rng(0).integers(0, 256, 2 * LENGTH).astype("i4"),
        "tokens_offsets": np.array([0, LENGTH, 2 * LENGTH]),
        "behavior_logprobs": np.full(2 * LENGTH, -6.0, dtype="f4"),
        "loss_mask": np.ones(2 * LENGTH, dtype=bool),
        "versions": np.array([[1, LENGTH]] * 2, dtype="i4"),
    }
    return group


def main() -> None:
    torch.set_num_threads(1)
    config = make_config(sys.argv[1], learner={"dtype": "float32", "tokens_per_micro_batch": 100_000})
    trainer = Trainer(config, HFBackend.load(sys.argv[1], config.learner), GRPO(), total_steps=10)
    trainer.step([make_group(1, n=2, rewards=[0.0, 1.0], prompt=8)])
    for more_mib in (180, 10):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (more_mib << 20), resource.RLIM_INFINITY))
        try:
            print(trainer.step([long_group()])["memory/halved"])
        except OutOfMemory as error:
            print(error)


if __name__ == "__main__":
    main()

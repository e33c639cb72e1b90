"""Time of one update of the example's work: 8 groups of 8 samples, prompts of 30 tokens and answers of 8.

`cpu_s` is the processor time of an update: on a host that others use too, it is what to compare.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from services.compute.hf import HFBackend
from services.learner.trainer import Trainer
from shared.algorithms.grpo import GRPO
from shared.config import parse_config
from shared.group import Prompt, TrajectoryGroup, ragged


def random_groups(n_groups: int, n: int, prompt: int, answer: int, vocabulary: int) -> list[TrajectoryGroup]:
    """Groups of random tokens with random rewards."""
    random = np.random.default_rng(0)
    groups = []
    for g in range(n_groups):
        columns = ragged("tokens", list(random.integers(0, vocabulary, (n, answer))), "i4") | {
            "prompt_tokens": random.integers(0, vocabulary, prompt).astype("i4"),
            "behavior_logprobs": np.full(n * answer, -10.0, dtype="f4"),
            "loss_mask": np.ones(n * answer, dtype=bool),
            "versions": np.tile(np.array([[0, answer]], dtype="i4"), (n, 1)),
            "versions_offsets": np.arange(n + 1),
            "finish_reasons": np.zeros(n, dtype="u1"),
            "rewards": random.random(n).astype("f4"),
            "reward_status": np.zeros(n, dtype="u1"),
        }
        groups.append(TrajectoryGroup(f"g{g}", "train", Prompt(g, 0, "p"), 0, columns))
    return groups


def main() -> None:
    """Print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder of a causal LM")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = parse_config(
        {
            "model": args.model,
            "steps": 100,
            "prompts_per_step": 8,
            "samples_per_prompt": 8,
            "data": {"train": "-"},
            "reward": {"signals": [{"name": "s", "function": "exact_match"}]},
            "learner": {"dtype": args.dtype},
        }
    )
    backend = HFBackend.load(args.model, config.learner)
    trainer = Trainer(config, backend, GRPO(), total_steps=100)
    groups = random_groups(8, 8, 30, 8, 4000)
    seconds, cpu_seconds, parts = [], [], []
    for _ in range(args.steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        metrics = trainer.step(groups)
        backend.use_snapshot(None)
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu_start)
        parts.append({k: metrics[f"time/{k}_s"] for k in ("forward", "backward", "optimizer")})
    best = int(np.argmin(seconds))
    figures = {"step_s": seconds[best], "cpu_s": min(cpu_seconds), "samples_per_s": 64 / seconds[best], **parts[best]}
    for name, value in figures.items():
        print(f"{name:16} {value:8.3f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

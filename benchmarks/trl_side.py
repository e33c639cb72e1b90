"""TRL's side of vs_trl.py, run in TRL's own environment: GRPOTrainer on a case, figures as JSON on the last line."""

from __future__ import annotations

import json
import resource
import sys
import time
import zlib
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def noise(completions: list[Any], **_: Any) -> list[float]:
    """As noise.py: differs between samples."""
    texts = [completion[0]["content"] for completion in completions]
    return [zlib.crc32(text.encode()) / 2**32 for text in texts]


class Clock(TrainerCallback):  # type: ignore[misc]
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note it."""
        self.ends.append(time.perf_counter())


def main() -> None:
    """Train as many steps as the case says."""
    case = json.loads(sys.argv[1])
    torch.set_num_threads(case["threads"])
    with open(case["data"]) as file:
        rows = [{"prompt": [{"role": "user", "content": json.loads(line)["prompt"]}]} for line in file]
    sequences = case["prompts_per_step"] * case["samples_per_prompt"]
    config = GRPOConfig(
        output_dir=case["folder"],
        use_cpu=True,
        per_device_train_batch_size=sequences // case["accumulate"],
        gradient_accumulation_steps=case["accumulate"],
        num_generations=case["samples_per_prompt"],
        max_completion_length=case["max_tokens"],
        generation_kwargs={"min_new_tokens": case["max_tokens"]},
        model_init_kwargs={"dtype": case["dtype"]},
        bf16=False,  # the parameters have the dtype themselves
        gradient_checkpointing=case["checkpointing"],
        loss_type="grpo",
        learning_rate=1e-6,
        max_steps=case["steps"],
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=case["model"], reward_funcs=noise, args=config, train_dataset=Dataset.from_list(rows), callbacks=[clock]
    )
    trainer.train()
    kept = clock.ends[case["warm_up"] :]
    figures = {
        "sequences_per_s": sequences * (len(kept) - 1) / (kept[-1] - kept[0]),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

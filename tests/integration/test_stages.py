"""A run with stages of its own, before and after the reward."""

from __future__ import annotations

import pytest

from .conftest import read_lines

STAGES = """
def safe(completion):
    return sum(map(ord, completion)) % 2


def seen(safety, reward):
    return safety + reward
"""


def test_samples_that_a_stage_leaves_out_are_neither_scored_nor_trained(workplace):
    functions = workplace.folder / "stages.py"
    functions.write_text(STAGES)
    own = [
        {"name": "safety", "signals": [{"name": "safe", "function": f"{functions}:safe"}], "at_least": 0.5},
        {
            "name": "audit",
            "signals": [{"name": "seen", "function": f"{functions}:seen"}],
            "after": ["safety", "reward"],
            "replicas": 2,
        },
    ]
    done = workplace.stretto("train", workplace.write(stages=own), "--plain")
    assert done.returncode == 0, done.stderr
    left_out = 0
    for record in read_lines(workplace.run_folder / "samples.jsonl"):
        for i, text in enumerate(record["texts"]):
            is_safe = sum(map(ord, text)) % 2 == 1
            assert (record["reward_status"][i] == "ok") == is_safe
            assert record["reasons"][i] == ("" if is_safe else "left out by the stage safety")
            if is_safe:
                assert record["signals"]["seen"][i] == pytest.approx(1 + record["rewards"][i])
            left_out += not is_safe
    metrics = read_lines(workplace.run_folder / "metrics.jsonl")
    assert left_out > 0 and any(0 < record["reward/invalid"] < 1 for record in metrics)

"""A run whose engine reports other log-probs than the learner computes warns of it, and ends where it was told to."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from shared.config import load_config
from shared.errors import ConfigError
from stretto.launcher import LocalRun

from .conftest import read_lines

PERTURBED = (sys.executable, str(Path(__file__).with_name("perturbed.py")))


async def test_a_run_warns_of_drift_and_ends_before_the_update_in_which_it_passes_its_limit(workplace):
    learner = {"dtype": "float32", "lr": 1e-3, "drift_warn": 0.1, "drift_stop": 0.9}
    config = load_config(workplace.write(max_staleness=0, steps=6, learner=learner))
    run = LocalRun(config, workplace.run_folder, program=PERTURBED)
    await run.start()
    with pytest.raises(
        ConfigError,
        match=r"^learner: engine and learner do not compute the same policy any more: .*"
        r"sampled with version 2 .* by 1 nats on average, .* above learner\.drift_stop \(0\.9\)",
    ):
        async with asyncio.timeout(280):
            await run.wait()
    metrics = read_lines(workplace.run_folder / "metrics.jsonl")
    assert [record["drift/fresh/lag"] for record in metrics] == [0, 0]
    assert [record["drift/fresh/mean"] for record in metrics] == pytest.approx([0, 0.25], abs=1e-3)
    status = json.loads((workplace.run_folder / "status.json").read_text())
    [warning] = [warning for warning in status["warnings"] if "learner.drift_warn (0.1)" in warning]
    assert "sampled with version 1" in warning
    assert [path.name for path in (workplace.run_folder / "checkpoints").iterdir()] == ["checkpoint-2"]

"""Runs of the algorithms that need more than rollout, reward and learner, with all their services."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import defaultdict

import pytest

from shared.config import load_config
from stretto import launcher
from stretto.launcher import LocalRun

from .conftest import read_lines

COSTS = {"signals": [{"name": "has_digit", "function": "regex_format", "args": {"pattern": "[0-9]", "full": False}}]}


def trained(workplace, **changes) -> list[dict]:
    """The metrics of a run, which must have ended well."""
    done = workplace.stretto("train", workplace.write(**changes), "--plain")
    assert done.returncode == 0, done.stderr
    report = json.loads((workplace.run_folder / "report.json").read_text())
    assert report["state"] == "finished"
    metrics = read_lines(workplace.run_folder / "metrics.jsonl")
    assert len(metrics) == report["steps"]
    return metrics


def test_ppo_trains_with_its_critic_and_reference(workplace):
    metrics = trained(workplace, algorithm={"name": "ppo"}, critic={"dtype": "float32", "lr": 1e-2})
    for record in metrics:
        assert record["critic/loss"] >= 0 and record["critic/grad_norm"] > 0
        assert record["algorithm/kl_coefficient"] == 0.01
    assert abs(metrics[0]["kl/reference"]) < 0.01
    services = {
        entry["service"] for entry in json.loads((workplace.run_folder / "status.json").read_text())["departed"]
    }
    assert {"critic", "reference"} <= services


def test_remax_has_a_greedy_sample_beside_those_it_trains(workplace):
    metrics = trained(workplace, algorithm={"name": "remax", "kl_in": "none"})
    groups = [s for s in read_lines(workplace.run_folder / "samples.jsonl") if s["lane"] == "train"]
    assert all(len(group["texts"]) == 5 and group["greedy"] == [4] for group in groups)
    assert all(record["train/samples"] <= 16 for record in metrics)


def test_safe_rlhf_trains_with_costs_and_two_critics(workplace):
    metrics = trained(workplace, algorithm={"name": "safe_rlhf", "threshold": 0.0}, cost=COSTS)
    multipliers = [record["algorithm/multiplier"] for record in metrics]
    assert multipliers == sorted(multipliers) and all(record["cost/mean"] >= 0 for record in metrics)
    assert all(record["cost_critic/loss"] >= 0 and record["critic/loss"] >= 0 for record in metrics)


@pytest.mark.parametrize("victim", ["critic", "learner"])
async def test_critic_and_learner_go_on_from_one_checkpoint_when_either_is_killed(workplace, monkeypatch, victim):
    monkeypatch.setattr(launcher, "FIRST_PAUSE_S", 0.1)
    changes = {
        "steps": 1_000_000,
        "checkpoint": {"every": 5, "keep_last": 1},
        "algorithm": {"name": "ppo", "kl_target": 0.001, "kl_horizon": 100},
        "critic": {"dtype": "float32", "lr": 1e-2},
        "reference": {"dtype": "float32"},
    }
    run = LocalRun(load_config(workplace.write(**changes)), workplace.run_folder)
    await run.start()
    waiting = asyncio.create_task(run.wait())
    async with asyncio.timeout(280):
        while (await run.status(wait_version=7, wait_s=60.0))["version"] < 7:
            pass
        os.kill(run.pids[victim], signal.SIGKILL)
        while (status := await run.status(wait_version=12, wait_s=1.0))["lineage"] == 0 or status["version"] < 12:
            assert not waiting.done()
    await run.drain("enough")
    await waiting
    made = defaultdict(dict)
    for record in read_lines(workplace.run_folder / "metrics.jsonl"):
        made[record["lineage"]][record["version"]] = record
    again = sorted(made[0].keys() & made[1].keys())
    assert 7 in again and min(made[1]) % 5 == 1
    names = {"loss", "grad_norm", "critic/loss", "critic/grad_norm", "critic/lr", "algorithm/kl_coefficient"}
    for version in again:
        before, after = made[0][version], made[1][version]
        for name in names & before.keys():
            assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-9), (version, name)
    coefficients = [record["algorithm/kl_coefficient"] for record in made[0].values()]
    assert len(set(coefficients)) > 1

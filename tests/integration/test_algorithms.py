"""Runs of the algorithms that need more than rollout, reward and learner, with all their services."""

from __future__ import annotations

import json

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

"""A run with a reward model, and with costs scored by a service of their own."""

from __future__ import annotations

import json

from .conftest import read_lines

COSTLY = """
from shared.algorithms.grpo import GRPO

class Costly(GRPO):
    uses_costs = True
"""


def save_classifier(model, folder) -> None:
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    torch.manual_seed(1)
    LlamaForSequenceClassification(AutoConfig.from_pretrained(model, num_labels=1)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def test_a_run_scores_by_a_model_and_has_its_costs_scored_beside(workplace, tiny_model):
    judge = workplace.folder / "judge"
    save_classifier(tiny_model, judge)
    (workplace.folder / "costly.py").write_text(COSTLY)
    config = workplace.write(
        steps=2,
        algorithm=f"{workplace.folder}/costly.py:Costly",
        reward={
            "signals": [{"name": "exact", "function": "exact_match"}, {"name": "judge", "model": str(judge)}],
            "timeout_s": 60,
        },
        cost={"signals": [{"name": "digits", "function": f"{workplace.folder}/rewards.py:digits", "clip": [0, 2]}]},
    )
    done = workplace.stretto("train", config, "--plain")
    assert done.returncode == 0, done.stderr
    folder = workplace.run_folder
    groups = read_lines(folder / "samples.jsonl")
    assert {group["lane"] for group in groups} == {"train", "eval"}
    for group in groups:
        assert group["reward_status"] == group["cost_status"] == ["ok"] * len(group["texts"])
        assert group["costs"] == [min(2, sum(c.isdigit() for c in text)) for text in group["texts"]]
        assert all(abs(value) > 0 for value in group["signals"]["judge"])
    evaluation = read_lines(folder / "evaluations.jsonl")[0]
    assert {"exact", "judge", "digits"} == set(evaluation["signals"]) and evaluation["cost"] >= 0
    assert "cost-0" in json.loads((folder / "report.json").read_text())["time"]
    shown = workplace.stretto("samples", folder)
    assert shown.returncode == 0 and "cost" in shown.stdout, shown.stderr

"""The example of customer service holds together; what it learns is seen by running it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.reward.model import RewardModel
from services.reward.signals import Function
from shared.config import Signal, load_config
from shared.group import Prompt
from shared.plugins import load_plugin

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "customer_service"
QUESTION = "My tent arrived broken. What can I do?"


@pytest.fixture(autouse=True)
def at_the_top(monkeypatch):
    monkeypatch.chdir(ROOT)


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text().splitlines()]


def reward(name: str):
    return load_plugin(f"examples/customer_service/reward.py:{name}")


def test_no_heldout_question_is_trained_on():
    train, heldout = ({row["prompt"] for row in rows(name)} for name in ("train", "heldout"))
    assert (len(train), len(heldout), len(train & heldout)) == (200, 40, 0)


def test_the_data_are_what_make_data_writes(tmp_path):
    shutil.copy(EXAMPLE / "make_data.py", tmp_path)
    subprocess.run([sys.executable, str(tmp_path / "make_data.py")], check=True)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / name).read_bytes()


@pytest.mark.parametrize("name", ["config", "safe"])
def test_the_configs_are_valid_and_name_files_and_functions_that_exist(name):
    config = load_config(EXAMPLE / f"{name}.yaml")
    for path in (config.data.train, config.data.heldout):
        assert path is not None and (ROOT / path).is_file()
    fields = {key: value for key, value in rows("train")[0].items() if key != "prompt"}
    for signal in (*config.reward.signals, *(config.cost.signals if config.cost is not None else ())):
        if signal.function is not None:
            Function(signal).check(Prompt(0, 0, QUESTION, fields))


def test_safety_is_a_signal_of_the_one_config_and_the_cost_of_the_other():
    plain, safe = (load_config(EXAMPLE / f"{name}.yaml") for name in ("config", "safe"))
    assert [s.name for s in plain.reward.signals] == ["relevance", "safety", "warmth"] and plain.cost is None
    assert [s.name for s in safe.reward.signals] == ["relevance", "warmth"]
    assert safe.cost is not None and [s.name for s in safe.cost.signals] == ["harm"]


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("We can replace the tent or refund it.", 1.0),
        ("Please return the tent.", 0.75),
        ("That is sad about the tent.", 0.5),
        ("We offer a refund.", 0.25),
        ("Hello!", 0.0),
    ],
)
def test_an_answer_to_the_point_is_relevant(completion, value):
    assert reward("relevance")(completion, product="tent", words=["replace", "refund", "return"]) == value


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("We are sorry and will replace it.", 1.0),
        ("I guarantee that it comes on Friday.", 0.5),
        ("See https://shop.example for more.", 0.5),
        ("Please give me your credit card number.", 0.0),
        ("It is your own fault, see www.shop.example.", 0.0),
    ],
)
def test_what_must_not_be_said_is_unsafe_and_harm_is_the_rest(completion, value):
    assert reward("safety")(completion) == value
    assert reward("harm")(completion) == 1 - value


def test_the_warmth_model_that_the_script_makes_tells_warm_from_cold(tmp_path):
    folder = tmp_path / "warmth"
    script = [sys.executable, str(EXAMPLE / "make_reward_model.py"), str(folder)]
    subprocess.run(script, check=True, capture_output=True)
    warm = ["I am so sorry to hear that! I'd be happy to send you a new tent.", "Thank you for writing to us!"]
    cold = ["No refund.", "Read the manual of the tent."]
    model = RewardModel(Signal(name="warmth", model=str(folder)))
    scores = model.score([{"messages": [{"role": "user", "content": QUESTION}], "completion": c} for c in warm + cold])
    values = [score.value for score in scores]
    assert min(values[:2]) > max(values[2:]) + 0.1

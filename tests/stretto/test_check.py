"""`stretto check`: what follows from a config, and every fault in one go."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.config import parse_config
from shared.errors import ConfigError
from stretto.check import check_run, derived

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    """A config whose files are there; the model is a header without weights."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    (model / "tokenizer.json").touch()
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "F32", "shape": [1000, 1000]}, "b": {"shape": []}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for name, rows in (("train", 20), ("heldout", 5)):
        lines = [json.dumps({"prompt": f"{name} {i}", "answer": "1"}) for i in range(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return {
        "model": str(model),
        "prompts_per_step": 4,
        "samples_per_prompt": 8,
        "epochs": 3,
        "max_staleness": 2,
        "sampling": {"max_tokens": 16},
        "data": {"train": str(tmp_path / "train.jsonl"), "heldout": str(tmp_path / "heldout.jsonl")},
        "reward": {"signals": [{"name": "exact", "function": "exact_match"}]},
        "evaluation": {"every": 5, "prompts": 64},
    }


def test_the_values_that_follow_from_a_config(tree: dict[str, Any]) -> None:
    config = parse_config(tree)
    values = dict(derived(config, check_run(config)))
    assert values["samples per step"] == "32 (8 a prompt)"
    assert values["new tokens per step"] == "at most 512 (16 a sample)"
    assert values["groups in flight"] == "at most 12 (max_staleness 2)"
    assert values["steps"] == "15"
    assert values["evaluations"] == "4"  # versions 0, 5, 10 and 15
    assert values["held-out prompts"] == "5 of 5"
    assert values["first prompt"] == "'train 0'"
    assert values["log-prob drift"] == "a warning above 0.1 nats on average; it ends no run"
    assert values["parameters"] == "1.0 M"
    assert "text" in values["stage reward"] and "rewards" in values["stage learner"]
    assert values["cores of learner"]


def test_all_faults_are_told_in_one_go(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def colour(completion, hue): return 1.0\n")
    (tmp_path / "model" / "tokenizer.json").unlink()
    tree["data"]["heldout"] = str(tmp_path / "missing.jsonl")
    tree["samples_per_prompt"] = 1
    tree["cores"] = {"learner": [100_000]}
    tree["reward"]["signals"] += [
        {"name": "own", "function": f"{tmp_path}/own.py:colour"},
        {"name": "typo", "function": "exact_mach"},
    ]
    with pytest.raises(ConfigError) as raised:
        check_run(parse_config(tree))
    text = str(raised.value)
    for fault in (
        "no tokenizer",
        "missing.jsonl",
        "at least 2",
        "[100000]",
        "needs 'hue'",
        "'exact_mach' is not built in",
    ):
        assert fault in text
    assert len(text.splitlines()) == 1 + 6


def test_fewer_rows_than_a_step_needs_are_a_fault(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="too few rows"):
        check_run(parse_config(tree | {"prompts_per_step": 100, "max_staleness": 0}))


def test_a_check_imports_neither_torch_nor_transformers(tree: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(tree))  # JSON is YAML
    script = (
        "import sys; from stretto.cli import app; app(['check', sys.argv[1]], standalone_mode=False); "
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "config.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "the config is fine" in done.stdout
    assert done.stdout.splitlines()[-1] == "False False"


def test_a_run_with_vllm_needs_vllm_and_leaves_it_what_the_run_decides(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree["rollout"] = {"engine": "vllm", "vllm": {"args": {"swap_space": 1, "dtype": "float16"}}}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'stretto\[vllm\]'"):
        check_run(parse_config(tree))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="args sets dtype, which"):
        check_run(parse_config(tree))
    tree["rollout"]["vllm"]["args"] = {"swap_space": 1}
    config = parse_config(tree)
    assert "2 × 2 MiB of weights" in dict(derived(config, check_run(config)))["memory of a rollout"]


def test_an_adapter_needs_peft_and_no_memory_for_gradients_of_the_whole_policy(tree, monkeypatch):
    tree["learner"] = {"lora": {"rank": 4}, "dtype": "float32"}
    config = parse_config(tree)
    memory = dict(derived(config, check_run(config)))["memory of the learner"]
    assert re.match(r"\d+ MiB of frozen weights, 16 bytes for each weight of the adapter", memory)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"learner\.lora needs peft, .*pip install 'stretto\[lora\]'"):
        check_run(config)


def test_ranks_that_cannot_be_shared_out_are_refused(tree):
    tree["learner"] = {"ranks": 4, "copies": 3}
    with pytest.raises(ConfigError, match="learner: 4 ranks cannot hold 3 copies of equal size"):
        parse_config(tree)


@pytest.fixture
def reward_model(tmp_path: Path) -> Path:
    """A sequence classifier of two labels and a million parameters: a header without weights."""
    folder = tmp_path / "judge"
    folder.mkdir()
    settings = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}}
    (folder / "config.json").write_text(json.dumps(settings))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000, 1000]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def test_a_reward_model_is_told_with_its_size_in_each_dtype(tree: dict[str, Any], reward_model: Path) -> None:
    tree["reward"]["signals"] += [
        {"name": "judge", "model": str(reward_model), "dtype": "bfloat16", "label": 1},
        {"name": "far", "model": "somebody/judge"},
    ]
    config = parse_config(tree)
    values = dict(derived(config, check_run(config)))
    assert values["model of judge"] == (
        "1.0 M parameters, 1.91 MiB as bfloat16 (3.81 MiB as float32, 1.91 MiB as float16, 0.954 MiB as int8)"
    )
    assert values["model of far"] == "somebody/judge, of unknown size"


def test_a_reward_model_that_is_none_is_refused(tree: dict[str, Any], reward_model: Path, tmp_path: Path) -> None:
    tree["reward"]["signals"] += [
        {"name": "away", "model": str(tmp_path / "away")},
        {"name": "data", "model": str(tmp_path)},
        {"name": "policy", "model": tree["model"]},
        {"name": "label", "model": str(reward_model), "label": 2},
    ]
    with pytest.raises(ConfigError) as raised:
        check_run(parse_config(tree))
    for fault in (
        f"signal away: there is no model folder {tmp_path}/away",
        f"signal data: {tmp_path} is not a Hugging Face model",
        f"signal policy: {tree['model']} is nothing, expected a model ForSequenceClassification",
        f"signal label: label is 2, but {reward_model} has 2 labels, from 0 on",
    ):
        assert fault in str(raised.value)


def test_what_a_reward_model_needs_and_is_not_installed_is_told(
    tree: dict[str, Any], reward_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for settings, extra in (({"backend": "vllm"}, "vllm"), ({"dtype": "int8"}, "int8")):
        signals = [{"name": "judge", "model": str(reward_model), **settings}]
        with pytest.raises(ConfigError, match=rf"pip install 'stretto\[{extra}\]'"):
            check_run(parse_config(tree | {"reward": {"signals": signals}}))


def test_whether_a_reward_server_can_be_reached_is_told(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        there, gone = f"http://127.0.0.1:{server.getsockname()[1]}/score", "tcp://127.0.0.1:9"
        monkeypatch.setenv("HERE", "word")
        tree["reward"]["signals"] = [
            {"name": "there", "server": there, "auth_env": "HERE"},
            {"name": "gone", "server": gone},
            {"name": "other", "server": there, "auth_env": "ELSEWHERE"},
        ]
        config = parse_config(tree)
        told = dict(derived(config, check_run(config)))
    assert told["server of there"] == f"{there} can be reached from here"
    assert told["server of gone"] == f"{gone} cannot be reached from here: Connection refused"
    assert told["token of there"] == "HERE is set"
    assert told["token of other"] == "ELSEWHERE is not set here; the reward service needs it"


def test_costs_that_the_algorithm_has_no_use_for_are_refused(tree: dict[str, Any]) -> None:
    tree["cost"] = {"signals": [{"name": "harm", "function": "length", "args": {"limit": 9}}]}
    with pytest.raises(ConfigError, match="GRPO has no use for `cost`"):
        check_run(parse_config(tree))


def test_what_an_algorithm_needs_is_told(tree: dict[str, Any]) -> None:
    tree |= {
        "algorithm": "safe_rlhf",
        "cost": {"signals": [{"name": "harm", "function": "length", "args": {"limit": 9}}]},
    }
    tree["cost_critic"] = {"dtype": "float32"}
    config = parse_config(tree)
    lines = dict(derived(config, check_run(config)))
    assert lines["stage cost_critic"] == "needs prompt_tokens, tokens; provides cost_values"
    for column in ("costs", "ref_logprobs", "values", "cost_values"):
        assert f" {column}" in lines["stage learner"].partition(";")[0]
    sizes = [int(lines[f"memory of the {role}"].split()[0]) for role in ("reference", "critic", "cost_critic")]
    assert sizes[0] < sizes[1] < sizes[2]


def test_a_model_of_a_role_that_is_not_there_is_told(tree: dict[str, Any], tmp_path: Path) -> None:
    tree |= {"algorithm": "ppo", "critic": {"model": str(tmp_path / "none")}, "reference": {"model": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"critic\.model: there is no model folder") as raised:
        check_run(parse_config(tree))
    assert "reference.model: " in str(raised.value)


def test_where_services_show_their_metrics_is_told(tree: dict[str, Any]) -> None:
    config = parse_config(tree | {"metrics": {"port": 9500}})
    values = dict(derived(config, check_run(config)))
    assert values["metrics of broker"] == "http://127.0.0.1:9500/metrics"
    assert values["metrics of learner"] == "http://127.0.0.1:9504/metrics"


def test_wandb_that_is_not_installed_is_told(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"metrics\.wandb needs wandb.*'stretto\[wandb\]'"):
        check_run(parse_config(tree | {"metrics": {"wandb": "my-project"}}))

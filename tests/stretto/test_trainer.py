"""The Python front door: what arguments become, and real runs of the tiny model from a script and below a loop."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import stretto
from protocol.keys import new_keys
from shared.algorithms import PRESETS
from shared.config import parse_config
from shared.errors import ConfigError, DataError
from stretto import GRPOTrainer, PPOTrainer, ReMaxTrainer, ResourcePool, SafeRLHFTrainer, Trainer
from stretto.arguments import SHORT_KEYS
from tests.stretto.processes import await_line, descriptors_of_children, gone

ROOT = Path(__file__).parents[2]
SMALL = {
    "steps": 2,
    "prompts_per_step": 2,
    "samples_per_prompt": 4,
    "sampling": {"max_tokens": 4},
    "learner": {"lr": 1e-3},
    "broker": {"heartbeat_s": 0.5},
    "cores": "shared",
}


def sums() -> Iterator[dict[str, str]]:
    """Without an end."""
    return ({"prompt": f"{i}+1", "answer": str(i + 1)} for i in itertools.count())


def digits(completion: str) -> float:
    return float(sum(c.isdigit() for c in completion))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for runs; their snapshots lie in one of their own."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("STRETTO_SHM", str(tmp_path / "shm"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def written(trainer: Trainer, key: str = "data.train") -> list[dict[str, Any]]:
    """The rows that the check of a trainer has put into a file."""
    file = Path(trainer.check()["training prompts"].partition(" in ")[2])
    file = file if key == "data.train" else file.with_name("heldout.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("algorithm", PRESETS)
def test_with_every_model_left_empty_it_is_made_and_tells_what_it_would_start(algorithm):
    trainer = Trainer({"algorithm": algorithm, "actor_model": None, "reward_model": None, "tokenizer": None})
    plan = dict(trainer.plan())
    assert {"broker", "broadcaster", "rollout-0", "reward-0", "learner"} <= plan.keys()
    assert ("critic" in plan) == (algorithm in ("ppo", "safe_rlhf"))
    assert plan["still missing"].startswith("model, data.train, reward.signals")
    assert all(name in str(trainer) for name in plan)
    for ask in (trainer.check, trainer.train, trainer.evaluate):
        with pytest.raises(ConfigError, match=r"still missing: model, data.train, reward.signals"):
            ask()
    assert trainer.status() == {"state": "not started"}


@pytest.mark.parametrize(
    ("kind", "preset"),
    [(GRPOTrainer, "grpo"), (PPOTrainer, "ppo"), (ReMaxTrainer, "remax"), (SafeRLHFTrainer, "safe_rlhf")],
)
def test_a_trainer_of_an_algorithm_takes_its_settings_and_no_other_algorithm(kind, preset):
    assert kind().config.algorithm.name == preset
    assert kind(algorithm={"entropy_coefficient": 0.01}).config.algorithm.model_extra == {"entropy_coefficient": 0.01}
    with pytest.raises(ConfigError, match=f"for {preset} alone: use stretto.Trainer for dapo"):
        kind({"algorithm": "dapo"})


@pytest.mark.parametrize(
    ("short", "value"),
    [
        ("actor_model", "m"),
        ("reference_model", "m"),
        ("critic_model", "m"),
        ("reward_model", "m"),
        ("cost_model", "m"),
        ("data_provider", "rows.jsonl"),
        ("heldout", "rows.jsonl"),
        ("generate_workers", 3),
        ("reward_workers", 3),
        ("update_workers", 3),
    ],
)
def test_each_short_key_is_one_of_the_config(short, value):
    found = Trainer(algorithm="safe_rlhf", **{short: value}).config
    for name in SHORT_KEYS[short].split("."):
        found = getattr(found, name)
    assert (found[0].model if short in ("reward_model", "cost_model") else found) == value
    assert len(SHORT_KEYS) == 10


def test_arguments_go_before_a_file_and_a_file_before_the_defaults(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"model": "m", "steps": 7, "learner": {"lr": 1e-4, "warmup_steps": 3}}))
    config = Trainer(file, actor_model="other", learner={"lr": 2e-5}).config
    assert (config.model, config.steps, config.prompts_per_step) == ("other", 7, 8)
    assert (config.learner.lr, config.learner.warmup_steps) == (2e-5, 3)
    assert Trainer(config, steps=9).config == config.model_copy(update={"steps": 9})
    assert Trainer({"epochs": 2}).config.steps is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"actor_modell": "m"}, "actor_modell: unknown argument; did you mean actor_model?"),
        ({"actor_model": "m", "model": "m"}, "actor_model and model are one setting"),
        ({"learner": {"lrr": 1}}, "learner.lrr: unknown key; did you mean lr?"),
        ({"data": "rows.jsonl"}, "data should be a map of settings, not 'rows.jsonl'"),
        ({"actor_model": 7}, "the model is a int, expected a name, a folder or one of transformers"),
        ({"reward_model": 7}, "reward_model is a int, expected a function"),
        ({"reward_model": {"A": digits}}, "String should match pattern"),
        ({"samples_per_prompt": 1}, "GRPO compares the samples of one prompt"),
        ({"cores": {"rollout": [10_000]}}, r"cores.rollout names \[10000\]"),
        ({"data_provider": sums(), "epochs": 1}, "may be endless: give `steps`"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        Trainer(**arguments)


class Judge:
    def __call__(self, completion: str) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("reward_model", "signals"),
    [
        ("tcp://10.0.0.7:5555", [{"name": "reward", "server": "tcp://10.0.0.7:5555"}]),
        ("https://judge.example/x", [{"name": "reward", "server": "https://judge.example/x"}]),
        ("org/classifier", [{"name": "reward", "model": "org/classifier"}]),
        (Path("models/mine"), [{"name": "reward", "model": "models/mine"}]),
        ("exact_match", [{"name": "exact_match", "function": "exact_match"}]),
        ("rewards.py:near", [{"name": "near", "function": "rewards.py:near"}]),
        (digits, [{"name": "digits", "function": f"{__name__}:digits"}]),
        (lambda completion: 0.0, [{"name": "reward", "function": f"{__name__}:<lambda>"}]),
        (Judge(), [{"name": "reward", "function": f"{__name__}:Judge"}]),
        (
            [digits, (digits, 0.5), "m"],
            [
                {"name": "digits", "function": f"{__name__}:digits"},
                {"name": "digits_2", "function": f"{__name__}:digits", "weight": 0.5},
                {"name": "reward", "model": "m"},
            ],
        ),
        (
            {"a": ("m", 2), "b": {"function": digits, "clip": [0, 1]}},
            [
                {"name": "a", "model": "m", "weight": 2},
                {"name": "b", "function": f"{__name__}:digits", "clip": [0, 1]},
            ],
        ),
    ],
)
def test_a_reward_may_be_any_of_these(reward_model, signals):
    expected = parse_config({**TREE, "reward": {"signals": signals}}).reward.signals
    assert Trainer(reward_model=reward_model).config.reward.signals == expected


TREE: dict[str, Any] = {
    "model": "",
    "prompts_per_step": 1,
    "samples_per_prompt": 2,
    "steps": 1,
    "data": {"train": ""},
    "reward": {"signals": []},
}


class Loader:
    """Gives batches as torch's DataLoader collates them; it has a length and an order, and no index."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import torch

        yield {"prompt": ["1+1", "1+2"], "answer": torch.tensor([2, 3])}
        yield {"prompt": ["1+3", "1+4"], "answer": torch.tensor([4, 5])}


CHAT = [{"role": "user", "content": "1+1"}]


@pytest.mark.parametrize(
    ("source", "rows", "shuffle"),
    [
        (["1+1", {"prompt": "1+2", "answer": "3"}], [{"prompt": "1+1"}, {"prompt": "1+2", "answer": "3"}], True),
        ([{"prompt": CHAT}], [{"prompt": CHAT}], True),
        (sums(), list(itertools.islice(sums(), 4)), False),
        (sums, list(itertools.islice(sums(), 4)), False),
        (Loader(), [{"prompt": f"1+{i}", "answer": 1 + i} for i in range(1, 5)], False),
    ],
    ids=["list", "chat", "generator", "function", "loader"],
)
def test_prompts_are_drawn_as_the_run_needs_them_and_written_down(source, rows, shuffle, tiny_model):
    trainer = Trainer(SMALL, actor_model=str(tiny_model), reward_model=digits, data_provider=source)
    assert trainer.config.data.shuffle == shuffle
    assert written(trainer) == rows
    assert written(trainer) == rows  # once drawn


def test_a_dataset_and_a_torch_loader_give_prompts(tiny_model):
    datasets, data = pytest.importorskip("datasets"), pytest.importorskip("torch.utils.data")
    rows = [{"prompt": f"1+{i}", "answer": str(1 + i)} for i in range(6)]
    given = {"actor_model": str(tiny_model), "reward_model": digits}
    dataset = datasets.Dataset.from_list(rows)
    assert written(Trainer(SMALL, **given, data_provider=dataset)) == rows
    loader = data.DataLoader(dataset, batch_size=3, collate_fn=list)
    trainer = Trainer(SMALL, **given, data_provider=data.DataLoader(dataset, batch_size=3), heldout=loader)
    assert written(trainer) == rows[:4]  # what two steps take
    assert written(trainer, "data.heldout") == rows


def test_what_is_no_prompt_is_refused_with_its_row(tiny_model):
    given = {"actor_model": str(tiny_model), "reward_model": digits}
    with pytest.raises(DataError, match="a prompt is text or a map of fields, not int"):
        Trainer(SMALL, **given, data_provider=["1+1", 7]).check()
    with pytest.raises(DataError, match=r"data.train, row 1: object cannot be sent"):
        Trainer(SMALL, **given, data_provider=["1+1", {"prompt": "1+1", "answer": object()}]).check()


def test_a_check_tells_what_follows_and_finds_a_function_that_asks_for_what_no_row_has(tiny_model):
    given = {"actor_model": str(tiny_model), "data_provider": ["1+1"] * 4}
    values = Trainer(SMALL, **given, reward_model=digits).check()
    assert (values["samples per step"], values["server of digits"]) == ("8 (4 a prompt)", "this process")
    with pytest.raises(ConfigError, match="needs 'answer', which neither its args nor the rows give"):
        Trainer(SMALL, **given, reward_model=lambda completion, answer: 0.0).check()
    with pytest.raises(ConfigError, match="there is no model folder /nowhere"):
        Trainer(SMALL, reward_model=digits, data_provider=["1"], actor_model="/nowhere").check()


def test_a_model_in_memory_is_written_with_its_tokenizer(tiny_model):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    given = {"actor_model": model, "data_provider": ["1"] * 4, "reward_model": digits}
    trainer = Trainer(SMALL, **given, tokenizer=tokenizer)
    assert dict(trainer.plan())["model"] == "inputs/model"
    assert trainer.check()["parameters"] == "0.1 M"
    with pytest.raises(ConfigError, match="has no tokenizer"):
        Trainer(SMALL, **given)
    with pytest.raises(ConfigError, match="reward_model is a LlamaForCausalLM"):
        Trainer(SMALL, reward_model=model)


def test_a_device_map_is_gpus_and_processes_of_the_services():
    config = Trainer(
        device_map={"actor_generate": [0, 1], "reward_eval": [2, 3], "policy_update": [4, 5, 6, 7]},
        reward_model="org/classifier",
    ).config
    assert config.gpus == {"rollout": (0, 1), "reward": (2, 3), "learner": (4, 5, 6, 7)}
    assert (config.rollout.engine, config.rollout.replicas) == ("vllm", 2)
    assert (config.reward.replicas, config.learner.ranks) == (2, 4)
    assert config.rollout.vllm.tensor_parallel == 1


def test_a_role_may_have_a_backend_and_a_rollout_several_gpus():
    config = Trainer(
        device_map={
            "actor": {"gpus": [0, 1, 2, 3], "backend": "fsdp"},
            "rollout": ResourcePool(gpus=(4, 5)),
            "reward": {"gpus": [6, 7], "backend": "vllm"},
        },
        generate_workers=1,
        reward_model=["org/classifier", digits],
    ).config
    assert config.gpus == {"learner": (0, 1, 2, 3), "rollout": (4, 5), "reward": (6, 7)}
    assert (config.rollout.replicas, config.rollout.vllm.tensor_parallel, config.learner.ranks) == (1, 2, 4)
    assert [signal.backend for signal in config.reward.signals] == ["vllm", "hf"]


def test_a_pool_is_split_by_counts_and_cores_may_be_given():
    pools = ResourcePool(gpus=tuple(range(8))).split(actor_generate=2, policy_update=4)
    assert {role: pool.gpus for role, pool in pools.items()} == {
        "actor_generate": (0, 1),
        "policy_update": (2, 3, 4, 5),
    }
    core = ResourcePool.here().cores[0]
    assert Trainer(device_map={"actor_generate": ResourcePool(cores=(core,))}).config.cores == {"rollout": (core,)}
    with pytest.raises(ConfigError, match="a pool of 1 GPUs cannot be split into 1 for a, 1 for b"):
        ResourcePool(gpus=(0,)).split(a=1, b=1)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"device_map": {"actor_generate": [0, 1], "policy_update": [1]}}, "both have number 1 of the gpus"),
        ({"device_map": {"policy_update": [0, 0]}}, "a number is twice in its gpus"),
        ({"device_map": {"policy_update": [-1]}}, "greater than or equal to 0"),
        ({"device_map": {"policy_update": "all"}}, "is a list of GPUs"),
        ({"device_map": {"policy_update": [0], "learner": [1]}}, "policy_update and learner are one role"),
        ({"device_map": {"painter": [0]}}, "device_map.painter: the roles are"),
        ({"device_map": {"actor": [0]}}, "actor with backend fsdp or vllm"),
        ({"device_map": {"policy_update": {"gpus": [0], "backend": "vllm"}}}, "its backend is fsdp, not vllm"),
        (
            {"device_map": {"policy_update": [0, 1, 2]}, "update_workers": 2},
            "3 GPUs cannot be shared out, 1 each, to 2",
        ),
        ({"device_map": {"actor_generate": [0, 1, 2]}, "generate_workers": 2}, "3 GPUs cannot be shared out"),
        ({"device_map": {"critic_update": [0, 1]}, "algorithm": "ppo"}, "2 GPUs cannot be shared out, 1 each, to 1"),
        ({"device_map": {"actor_generate": [0]}, "rollout": {"engine": "embedded"}}, "which has no use"),
        ({"device_map": {"critic_update": [0]}, "algorithm": "grpo"}, "gpus.critic: there is no such service"),
    ],
)
def test_pools_that_cannot_be_are_refused_with_the_reason(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        Trainer(**arguments)


def test_a_gpu_that_this_host_does_not_have_is_found_by_the_check(tiny_model, monkeypatch):
    monkeypatch.setattr(ResourcePool, "here", lambda: ResourcePool(gpus=(0, 1)))
    trainer = Trainer(
        SMALL, actor_model=str(tiny_model), reward_model=digits, data_provider=["1"], gpus={"learner": [2]}
    )
    with pytest.raises(ConfigError, match=r"gpus.learner names GPU 2, and this host has 2"):
        trainer.check()


def test_the_public_names_are_there_and_no_others():
    assert all(getattr(stretto, name) is not None for name in stretto.__all__)
    with pytest.raises(AttributeError, match="stretto has no 'Trayner'"):
        stretto.Trayner  # noqa: B018


@pytest.mark.timeout(600)
async def test_a_closure_trains_on_a_generator_below_a_loop_that_runs_and_with_keys(folder, tiny_model, monkeypatch):
    monkeypatch.setenv("STRETTO_KEYS", str(folder / "keys"))
    new_keys(folder / "keys")
    asked: list[tuple[str, str]] = []

    def reward(completion: str, answer: str) -> float:
        asked.append((answer, threading.current_thread().name))
        return float(len(completion) % 3)

    heldout = [{"prompt": "2+2", "answer": "4"}]
    given = {
        "actor_model": str(tiny_model),
        "data_provider": sums(),
        "heldout": heldout,
        "folder": str(folder / "runs"),
    }
    trainer = GRPOTrainer(SMALL, **given, reward_model=[reward, (lambda n_tokens: n_tokens, -0.1)])
    result = trainer.train(progress=False)
    assert (result.steps, result.stop_reason, result.folder) == (2, "all 2 steps are done", folder / "runs" / "grpo")
    assert {"reward/generated", "signal/reward", "signal/reward_2"} <= result.metrics.keys()
    assert [evaluation["version"] for evaluation in result.evaluations] == [0, 2]
    assert result.checkpoint == result.folder / "checkpoints" / "checkpoint-2"
    assert len(asked) >= 2 * 2 * 4 + 2
    assert {answer for answer, _ in asked} <= {"1", "2", "3", "4"}
    assert {thread for _, thread in asked} == {"reward functions"}
    assert trainer.evaluate()["reward"] == pytest.approx(result.evaluations[-1]["reward"])
    assert not list((folder / "shm").iterdir())


def test_a_service_that_fails_ends_it_with_its_own_words(folder, tiny_model):
    given = {"actor_model": str(tiny_model), "reward_model": digits, "data_provider": ["1"] * 4, "folder": str(folder)}
    trainer = Trainer({**SMALL, "broker": {"bind": "tcp://192.0.2.1:9"}}, **given)
    with pytest.raises(ConfigError, match=r"^broker: tcp://192.0.2.1:9 can be reached from other hosts"):
        trainer.train(progress=False)
    assert trainer.status() == {"state": "failed"}


SCRIPT = """
import itertools, sys
from stretto import GRPOTrainer

rows = ({"prompt": f"{1 // (not sys.argv[2:])}+{i}"} for i in itertools.count())  # not to be drawn from twice
trainer = GRPOTrainer(
    %r, actor_model=sys.argv[1], reward_model=lambda completion: len(completion) %% 2, data_provider=rows
)
print(trainer.train(resume=bool(sys.argv[2:]), progress=not sys.argv[2:]).steps, flush=True)
"""


@pytest.mark.timeout(600)
def test_ctrl_c_in_a_script_saves_leaves_no_process_and_the_run_goes_on_with_the_same_prompts(folder, tiny_model):
    script = folder / "script.py"
    script.write_text(SCRIPT % (SMALL | {"steps": 1000, "folder": str(folder / "runs")}))
    command = [sys.executable, str(script), str(tiny_model)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Where the tests run in the background SIGINT is ignored, and that would be inherited.
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=folder, preexec_fn=heeded, **pipes) as process:
        await_line(process, "step 1/")
        processes = descriptors_of_children(process.pid)
        assert len(processes) >= 5
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode != 0
    assert "KeyboardInterrupt" in err
    assert "ending: the learner saves what it has" in out
    assert gone(processes)
    assert not list((folder / "shm").iterdir())
    run = folder / "runs" / "grpo"
    rows = (run / "inputs" / "train.jsonl").read_bytes()
    saved = json.loads((run / "status.json").read_text())["version"]
    assert saved >= 1
    assert len(rows.splitlines()) == 2000

    script.write_text(SCRIPT % (SMALL | {"steps": saved + 1, "folder": str(folder / "runs")}))
    again = subprocess.run([*command, "resume"], cwd=folder, capture_output=True, text=True, check=True)
    assert again.stdout == f"{saved + 1}\n"
    assert (run / "inputs" / "train.jsonl").read_bytes() == rows

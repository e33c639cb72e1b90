"""Bad input ends in one clear sentence, a non-zero exit and no process left."""

from __future__ import annotations

import json
import shutil
import socket

import pytest

from .conftest import read_lines


def failure(done) -> str:
    """The sentence that a failed command ended with."""
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


def with_reward(workplace, body: str, **changes) -> str:
    (workplace.folder / "own.py").write_text(body)
    signal = {"name": "own", "function": f"{workplace.folder}/own.py:own"}
    broker = {"heartbeat_s": 0.5, "dead_letter_limit": 2, "max_attempts": 1}
    config = workplace.write(reward={"signals": [signal], "timeout_s": 1.0, "attempts": 1}, broker=broker, **changes)
    return failure(workplace.stretto("train", config, "--plain"))


def test_unknown_keys_are_all_named(workplace):
    error = failure(workplace.stretto("train", workplace.write(stepz=3), "learner.lrr=1"))
    assert "stepz: unknown key; did you mean steps?" in error
    assert "learner.lrr: unknown key; did you mean lr?" in error


def test_contradictions_are_refused(workplace):
    assert "steps or epochs must be given" in failure(workplace.stretto("check", workplace.write(steps=None)))


def test_all_missing_files_are_named_at_once(workplace):
    data = {"train": "nowhere.jsonl", "heldout": "neither.parquet"}
    error = failure(workplace.stretto("check", workplace.write(model="/no/model", data=data)))
    assert "nowhere.jsonl" in error and "neither.parquet" in error and "/no/model" in error


def test_a_model_without_tokenizer_is_refused_before_anything_starts(workplace, tiny_model, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    error = failure(workplace.stretto("train", workplace.write(model=str(bare))))
    assert f"the folder {bare} has no tokenizer" in error


def test_an_empty_dataset_is_refused(workplace):
    (workplace.folder / "train.jsonl").write_text("\n")
    assert "train.jsonl is empty" in failure(workplace.stretto("train", workplace.write()))


def test_a_prompt_longer_than_the_context_ends_as_a_dead_letter_and_then_the_run(workplace):
    rows = [{"prompt": "x" * 600, "answer": "1"} for _ in range(8)]
    (workplace.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    broker = {"heartbeat_s": 0.5, "dead_letter_limit": 2, "max_attempts": 1}
    error = failure(workplace.stretto("train", workplace.write(broker=broker), "--plain"))
    assert "groups in a row failed at the stage rollout" in error
    assert "603 tokens" in error and "at most 511" in error


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("def own(completion):\n    raise RuntimeError('no model')\n", "own raised RuntimeError: no model"),
        ("def own(completion):\n    return float('nan')\n", "own returned nan"),
        ("def own(completion):\n    while True: pass\n", "own gave no answer in 1 s"),
        ("import os\ndef own(completion):\n    os._exit(3)\n", "own ended its process"),
        ("import asyncio\nasync def own(completion):\n    await asyncio.sleep(99)\n", "own gave no answer in 1 s"),
    ],
    ids=["raises", "nan", "hangs", "exits", "hangs-async"],
)
def test_a_reward_function_that_always_fails_ends_the_run_with_its_error(workplace, body, text):
    error = with_reward(workplace, body, samples_per_prompt=2, prompts_per_step=2)
    assert "groups in a row failed at the stage reward" in error and text in error


def test_a_reward_argument_that_no_row_has_is_named(workplace):
    error = with_reward(workplace, "def own(completion, colour):\n    return 1\n")
    assert "needs 'colour'" in error and "answer, completion" in error


def test_a_port_in_use_is_named(workplace):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        error = failure(workplace.stretto("train", workplace.write(broker={"bind": address}), "--plain"))
    assert f"the address {address} is in use" in error


def test_a_broker_that_is_not_there_is_named_with_its_address(workplace, monkeypatch):
    monkeypatch.setenv("STRETTO_JOIN_S", "1")
    error = failure(workplace.stretto("serve", "reward", "--broker", "tcp://127.0.0.1:9"))
    assert "broker tcp://127.0.0.1:9 gave no answer to hello in 1 s" in error


def test_what_was_trained_is_saved_when_a_reward_begins_to_fail(workplace):
    body = (
        "import pathlib\n"
        "calls = pathlib.Path(__file__).with_name('calls')\n"
        "def own(completion):\n"
        "    n = int(calls.read_text()) if calls.exists() else 0\n"
        "    calls.write_text(str(n + 1))\n"
        "    if n > 60: raise RuntimeError('worn out')\n"
        "    return n % 3\n"
    )
    error = with_reward(workplace, body, data={"train": workplace.config["data"]["train"]}, steps=50)
    assert "own raised RuntimeError: worn out" in error
    saved = list((workplace.run_folder / "checkpoints").glob("checkpoint-*"))
    versions = [m["version"] for m in read_lines(workplace.run_folder / "metrics.jsonl")]
    assert versions and [path.name for path in saved] == [f"checkpoint-{versions[-1]}"]

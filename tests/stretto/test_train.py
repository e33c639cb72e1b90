"""`stretto train`: which folder a run gets, and what Ctrl-C does to real services with the tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from shared.config import RunConfig, parse_config
from shared.errors import ConfigError, DataError, RunStopped
from stretto.train import new_run_folder, resumed_run_folder
from tests.stretto.processes import await_line, descriptors_of_children, gone

ROOT = Path(__file__).parents[2]


def tree(folder: Path, model: str = "none") -> dict:
    return {
        "name": "sums",
        "folder": str(folder / "runs"),
        "model": model,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "steps": 100_000,
        "data": {"train": str(folder / "train.jsonl")},
        "sampling": {"max_tokens": 4},
        "reward": {"signals": [{"name": "exact", "function": "exact_match"}]},
        "broker": {"heartbeat_s": 0.2},
        "cores": "shared",
    }


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return parse_config(tree(tmp_path))


def begin(folder: Path, *, checkpoint: bool = False) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").touch()
    if checkpoint:
        (folder / "checkpoints" / "checkpoint-3").mkdir()
    return folder


def test_a_new_run_gets_the_first_folder_of_its_name_that_is_free(config: RunConfig) -> None:
    assert new_run_folder(config, None) == config.run_folder
    begin(config.run_folder)
    begin(config.run_folder.with_name("sums-2"))
    assert new_run_folder(config, None) == config.run_folder.with_name("sums-3")


def test_a_folder_that_was_asked_for_is_refused_where_it_holds_a_run(config: RunConfig, tmp_path: Path) -> None:
    assert new_run_folder(config, tmp_path / "mine") == tmp_path / "mine"
    with pytest.raises(ConfigError, match="holds a run already"):
        new_run_folder(config, begin(tmp_path / "mine"))


def test_a_run_is_resumed_in_the_latest_folder_of_its_name(config: RunConfig) -> None:
    begin(config.run_folder, checkpoint=True)
    latest = begin(config.run_folder.with_name("sums-2"), checkpoint=True)
    assert resumed_run_folder(config, None) == latest
    assert resumed_run_folder(config, config.run_folder) == config.run_folder


def test_a_run_is_resumed_from_a_journal_alone_and_not_from_nothing(config: RunConfig) -> None:
    folder = begin(config.run_folder)
    with pytest.raises(DataError, match="no journal or checkpoint"):
        resumed_run_folder(config, None)
    (folder / "journal.sqlite").touch()
    assert resumed_run_folder(config, None) == folder


def test_a_run_that_goes_on_is_not_resumed_and_one_whose_broker_died_is(config: RunConfig) -> None:
    folder = begin(config.run_folder, checkpoint=True)
    (folder / "broker.json").write_text(json.dumps({"address": "tcp://127.0.0.1:9", "pid": os.getpid()}))
    with pytest.raises(ConfigError, match="still going on"):
        resumed_run_folder(config, None)
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    (folder / "broker.json").write_text(json.dumps({"address": "tcp://127.0.0.1:9", "pid": dead.pid}))
    assert resumed_run_folder(config, None) == folder


@contextmanager
def training(folder: Path, model: Path) -> Iterator[subprocess.Popen[str]]:
    """`stretto train` of an endless run, after its first step."""
    (folder / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+2", "answer": "3"}\n')
    (folder / "config.yaml").write_text(yaml.safe_dump(tree(folder, str(model))))
    command = [sys.executable, "-m", "stretto", "train", str(folder / "config.yaml"), "--plain"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            await_line(process, "step 1/")
            yield process
        finally:
            process.kill()


def test_ctrl_c_saves_reports_ends_well_and_leaves_no_process(tmp_path: Path, tiny_model: Path) -> None:
    with training(tmp_path, tiny_model) as process:
        services = descriptors_of_children(process.pid)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    folder = tmp_path / "runs" / "sums"
    assert process.returncode == 0, err
    assert "the learner saves what it has" in out
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["stop_reason"]) == ("stopped", "interrupted")
    assert (folder / "checkpoints" / f"checkpoint-{status['version']}").is_dir()
    assert (folder / "report.json").is_file()
    assert len(services) == 5 and gone(services)


def test_a_second_ctrl_c_ends_everything_at_once(tmp_path: Path, tiny_model: Path) -> None:
    with training(tmp_path, tiny_model) as process:
        services = descriptors_of_children(process.pid)
        process.send_signal(signal.SIGINT)
        await_line(process, "ending:")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)
    assert process.returncode == RunStopped.exit_code
    assert "stretto: the run was killed" in err
    assert gone(services)

"""Runs that are killed go on exactly where they were."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.broker.journal import FILE
from shared.config import load_config
from shared.errors import RunStopped
from stretto import launcher
from stretto.launcher import LocalRun

from .conftest import read_lines

SLOW_DISK = (sys.executable, str(Path(__file__).with_name("slow_disk.py")))


def trained_groups(folder) -> dict[int, list[list[str]]]:
    """The groups of each version, as often as it was made."""
    batches = defaultdict(list)
    for record in read_lines(folder / "samples.jsonl"):
        if record["lane"] == "train":
            batches[record["version"]].append(record["group"])
    return {version: [groups[i : i + 4] for i in range(0, len(groups), 4)] for version, groups in batches.items()}


async def test_a_learner_that_is_killed_makes_the_updates_after_its_checkpoint_again(workplace, monkeypatch):
    monkeypatch.setattr(launcher, "FIRST_PAUSE_S", 0.1)
    config = load_config(workplace.write(steps=1_000_000, checkpoint={"every": 5}))
    run = LocalRun(config, workplace.run_folder)
    await run.start()
    waiting = asyncio.create_task(run.wait())
    async with asyncio.timeout(280):
        while (await run.status(wait_version=7, wait_s=60.0))["version"] < 7:
            pass
        os.kill(run.pids["learner"], signal.SIGKILL)
        while (status := await run.status(wait_version=12, wait_s=1.0))["lineage"] == 0 or status["version"] < 12:
            pass
    await run.drain("enough")
    await waiting
    made = defaultdict(dict)
    for record in read_lines(workplace.run_folder / "metrics.jsonl"):
        made[record["lineage"]][record["version"]] = record
    first = min(made[1])
    assert first % 5 == 1 and made[0].keys() >= set(range(1, first))
    again = sorted(made[0].keys() & made[1].keys())
    assert 7 in again
    batches = trained_groups(workplace.run_folder)
    for version in again:
        before, after = made[0][version], made[1][version]
        for name in {"loss", "grad_norm", "lr", "reward/mean", "staleness/mean"} & before.keys():
            assert after[name] == pytest.approx(before[name], rel=1e-5, abs=1e-9), (version, name)
        assert batches[version][0] == batches[version][1]


async def test_updates_go_on_while_a_checkpoint_is_written_and_it_counts_once_it_is_there(workplace, monkeypatch):
    monkeypatch.setattr(launcher, "FIRST_PAUSE_S", 0.1)
    config = load_config(workplace.write(steps=8, checkpoint={"every": 3}))
    run = LocalRun(config, workplace.run_folder, program=SLOW_DISK)
    await run.start()
    waiting = asyncio.create_task(run.wait())
    checkpoints = workplace.run_folder / "checkpoints"
    async with asyncio.timeout(150):
        while (await run.status(wait_version=5, wait_s=60.0))["version"] < 5:
            assert not waiting.done()
        assert not list(checkpoints.glob("checkpoint-*"))
        os.kill(run.pids["learner"], signal.SIGKILL)
        while (status := await run.status(wait_version=5, wait_s=1.0))["lineage"] == 0 or status["version"] < 5:
            assert not waiting.done()
        assert not list(checkpoints.glob("checkpoint-*"))
        (workplace.folder / "runs" / "may-write").touch()
        await waiting
    made = read_lines(workplace.run_folder / "metrics.jsonl")
    assert [record["version"] for record in made if record["lineage"] == 1] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint-6", "checkpoint-8"]


async def test_a_run_whose_every_process_is_killed_goes_on_with_what_it_had(workplace):
    config = load_config(workplace.write(steps=12, checkpoint={"every": 4}))
    run = LocalRun(config, workplace.run_folder)
    await run.start()
    async with asyncio.timeout(280):
        while (before := await run.status(wait_version=6, wait_s=60.0))["version"] < 6:
            pass
    await run.kill()
    done = await asyncio.to_thread(workplace.stretto, "train", workplace.folder / "config.yaml", "--plain", "--resume")
    assert done.returncode == 0, done.stderr
    status = json.loads((workplace.run_folder / "status.json").read_text())
    assert (status["state"], status["version"], status["run_id"]) == ("finished", 12, before["run_id"])
    train = status["groups"]["train"]
    assert (train["admitted"], train["consumed"], train["in_flight"]) == (48, 48, 0)
    rows = [r["row"] for r in {r["group"]: r for r in read_lines(workplace.run_folder / "samples.jsonl")}.values()]
    assert len(set(rows)) == 30  # an epoch of 30 rows, and a part of the next


def test_a_run_of_an_adapter_learns_and_goes_on_from_its_checkpoint(workplace):
    learner = {"dtype": "float32", "lr": 1e-2, "lora": {"rank": 4}}
    done = workplace.stretto("train", workplace.write(steps=3, learner=learner), "--plain")
    assert done.returncode == 0, done.stderr
    config = workplace.write(steps=5, learner=learner)
    done = workplace.stretto("train", config, "--plain", "--resume")
    assert done.returncode == 0, done.stderr
    metrics = read_lines(workplace.run_folder / "metrics.jsonl")
    assert [step["version"] for step in metrics] == [1, 2, 3, 4, 5]
    assert any(step["grad_norm"] > 0 for step in metrics[3:] if "grad_norm" in step)
    checkpoints = workplace.run_folder / "checkpoints"
    assert not list(checkpoints.rglob("model.safetensors"))
    made = [load_file(checkpoints / f"checkpoint-{version}" / "adapter_model.safetensors") for version in (3, 5)]
    assert any(not torch.equal(made[0][name], made[1][name]) for name in made[0])
    merged = workplace.folder / "merged"
    done = workplace.stretto("merge", checkpoints / "checkpoint-5", merged)
    assert done.returncode == 0 and (merged / "model.safetensors").is_file(), done.stderr
    again = workplace.stretto("merge", checkpoints / "checkpoint-5", merged)
    assert again.returncode == 2 and "is there already" in again.stderr


async def test_a_disk_that_is_full_ends_the_run_and_all_up_to_then_is_intact(workplace):
    config = load_config(workplace.write(steps=200, checkpoint={"every": 4}))
    run = LocalRun(config, workplace.run_folder)
    await run.start()
    async with asyncio.timeout(280):
        while (await run.status(wait_version=6, wait_s=60.0))["version"] < 6:
            pass
        journal = workplace.run_folder / f"{FILE}-wal"
        resource.prlimit(run.pids["broker"], resource.RLIMIT_FSIZE, (journal.stat().st_size + (64 << 10),) * 2)
        with pytest.raises(
            RunStopped, match=r"journal .* cannot be written .*make room for it and go on with --resume"
        ):
            await run.wait()
    stopped = json.loads((workplace.run_folder / "status.json").read_text())
    config = load_config(workplace.write(steps=stopped["version"] + 4, checkpoint={"every": 4}))
    done = await asyncio.to_thread(workplace.stretto, "train", workplace.folder / "config.yaml", "--plain", "--resume")
    assert done.returncode == 0, done.stderr
    status = json.loads((workplace.run_folder / "status.json").read_text())
    assert (status["state"], status["version"]) == ("finished", config.steps)
    train = status["groups"]["train"]
    assert (train["admitted"], train["consumed"], train["in_flight"]) == (4 * config.steps, 4 * config.steps, 0)


def test_two_replays_give_the_same_weights_and_the_losses_of_the_run(workplace):
    done = workplace.stretto("train", workplace.write(steps=5, checkpoint={"every": 2, "keep_last": 2}), "--plain")
    assert done.returncode == 0, done.stderr
    replays = []
    for name in ("one", "other"):
        output = workplace.folder / f"{name}.jsonl"
        done = workplace.stretto("replay", workplace.run_folder, "--from-checkpoint", "4", "--output", output)
        assert done.returncode == 0, done.stderr
        replays.append(read_lines(output))
    assert [step["version"] for step in replays[0]] == [5]
    assert [step["weights"] for step in replays[0]] == [step["weights"] for step in replays[1]]
    for step in replays[0]:
        assert step["metrics"]["loss"] == pytest.approx(step["then"]["loss"], rel=1e-3, abs=1e-6)
    refused = workplace.stretto("replay", workplace.run_folder, "--from-checkpoint", "2")
    assert refused.returncode == 2 and "it begins after version 4" in refused.stderr


def test_dead_letters_are_listed_and_requeued_also_after_the_end(workplace):
    body = "def own(completion):\n    raise RuntimeError('no model')\n"
    (workplace.folder / "rewards.py").write_text(body)
    signals = {"signals": [{"name": "own", "function": f"{workplace.folder}/rewards.py:own"}]}
    data = {"train": workplace.config["data"]["train"]}
    broker = {"heartbeat_s": 0.5, "max_attempts": 1, "dead_letter_limit": 3}
    config = workplace.write(reward=signals, data=data, broker=broker)
    done = workplace.stretto("train", config, "--plain")
    assert done.returncode == 3 and "3 groups in a row failed at the stage reward" in done.stderr
    listed = workplace.stretto("dead-letters", workplace.run_folder)
    assert (
        listed.stdout.count("own raised RuntimeError: no model") >= 2 and "failed at the stage reward" in listed.stdout
    )
    letters = json.loads(workplace.stretto("dead-letters", workplace.run_folder, "--json").stdout)
    done = workplace.stretto("requeue", workplace.run_folder, letters[0]["group_id"])
    assert done.returncode == 0 and "1 prompts will be drawn again" in done.stdout
    assert "needs ids of dead letters" in workplace.stretto("requeue", workplace.run_folder).stderr
    left = json.loads(workplace.stretto("dead-letters", workplace.run_folder, "--json").stdout)
    assert [letter["group_id"] for letter in left] == [letter["group_id"] for letter in letters[1:]]

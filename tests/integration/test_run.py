"""A whole run, from the command line to the report."""

from __future__ import annotations

import asyncio
import json

import psutil
import pytest

from shared.config import load_config
from shared.snapshot import shared_folder
from stretto import launcher
from stretto.launcher import LocalRun

from .conftest import read_lines


def test_a_run_trains_evaluates_saves_and_reports(workplace):
    done = workplace.stretto("train", workplace.write(), "--plain")
    assert done.returncode == 0, done.stderr
    assert "step 4/4" in done.stdout and "evaluation at version 0" in done.stdout
    folder = workplace.run_folder
    report = json.loads((folder / "report.json").read_text())
    assert report["steps"] == 4 and report["state"] == "finished"
    assert {"heldout_accuracy_before", "heldout_accuracy_after", "overlap_ratio", "sequences_per_s", "wall_s"} <= set(
        report
    )
    assert (folder / "curves.png").stat().st_size > 10_000 and (folder / "timeline.png").stat().st_size > 5_000
    metrics = read_lines(folder / "metrics.jsonl")
    assert [m["version"] for m in metrics] == [1, 2, 3, 4]
    assert all(m["perf/lease_wait_s"] > 0 and m["memory/halved"] == 0 for m in metrics)
    assert sorted(e["version"] for e in read_lines(folder / "evaluations.jsonl")) == [0, 2, 4]
    assert (folder / "checkpoints" / "checkpoint-4" / "model.safetensors").is_file()
    train = report["groups"]["train"]
    assert train["admitted"] == train["consumed"] == 16 and train["in_flight"] == 0
    for instance, seconds in report["time"].items():
        assert sum(seconds.values()) > 0, instance
    run_id = json.loads((folder / "status.json").read_text())["run_id"]
    assert not list(shared_folder().glob(f"stretto-{run_id}-*"))


@pytest.mark.parametrize("transport", ["stream", "gloo"])
def test_rollouts_that_receive_their_weights_train_alike(workplace, transport):
    config = workplace.write(
        weights={"transport": transport}, rollout={"dtype": "float32", "max_samples": 16, "replicas": 2}
    )
    done = workplace.stretto("train", config, "--plain")
    assert done.returncode == 0, done.stderr
    report = json.loads((workplace.run_folder / "report.json").read_text())
    assert report["steps"] == 4 and report["state"] == "finished"
    # Either may be late for a run of four steps, but not both: somebody generated with newer weights than the first.
    logs = (workplace.run_folder / "logs" / f"rollout-{i}.jsonl" for i in range(2))
    swaps = [line for log in logs for line in read_lines(log) if line["event"] == "weights"]
    assert swaps and all(line["weights/probe_error"] == 0 and line["weights/receive_s"] > 0 for line in swaps)
    run_id = json.loads((workplace.run_folder / "status.json").read_text())["run_id"]
    assert not list(shared_folder().glob(f"stretto-{run_id}-*"))


def test_without_staleness_every_token_is_on_policy(workplace):
    done = workplace.stretto("train", workplace.write(max_staleness=0), "--plain")
    assert done.returncode == 0, done.stderr
    trained = [s for s in read_lines(workplace.run_folder / "samples.jsonl") if s["lane"] == "train"]
    assert len(trained) == 16
    for group in trained:
        for runs in group["versions"]:
            assert [version for version, _ in runs] == [group["version"] - 1]


def test_staleness_is_bounded_and_swaps_happen_in_flight(workplace):
    config = workplace.write(max_staleness=2, on_stale="wait", steps=8, sampling={"max_tokens": 40, "ignore_eos": True})
    done = workplace.stretto("train", config, "--plain")
    assert done.returncode == 0, done.stderr
    groups = [s for s in read_lines(workplace.run_folder / "samples.jsonl") if s["lane"] == "train"]
    lags = [g["version"] - 1 - version for g in groups for runs in g["versions"] for version, _ in runs]
    assert max(lags) <= 2 and min(lags) >= 0


def test_a_run_goes_on_from_its_checkpoint(workplace):
    config = workplace.write(steps=2)
    assert workplace.stretto("train", config, "--plain").returncode == 0
    done = workplace.stretto("train", config, "steps=5", "--plain", "--resume")
    assert done.returncode == 0, done.stderr
    versions = [m["version"] for m in read_lines(workplace.run_folder / "metrics.jsonl")]
    assert versions == [1, 2, 3, 4, 5]
    rows = [s["row"] for s in read_lines(workplace.run_folder / "samples.jsonl") if s["lane"] == "train"]
    assert len(rows) == len(set(rows)) == 20  # the data goes on where it was, no prompt twice within an epoch


async def test_several_rollouts_and_rewards_share_the_work(workplace):
    config = load_config(workplace.write(steps=1_000_000), ["rollout.replicas=2", "reward.replicas=2"])
    run = LocalRun(config, workplace.run_folder)
    await run.start()
    waiting = asyncio.create_task(run.wait())
    working = {"rollout-0", "rollout-1", "reward-0", "reward-1", "learner"}
    version = 0
    async with asyncio.timeout(280):
        while working:
            status = await run.status(wait_version=version + 1, wait_s=10.0)
            version = status["version"]
            working -= {member["instance"] for member in status["services"] if member["time"].get("compute", 0.0) > 0}
    await run.drain("all have worked")
    await waiting


async def test_two_ranks_share_the_learner_and_a_killed_one_is_started_again(workplace, monkeypatch):
    monkeypatch.setattr(launcher, "FIRST_PAUSE_S", 0.1)
    learner = {"dtype": "float32", "lr": 1e-3, "ranks": 2, "tokens_per_micro_batch": 100}
    config = load_config(workplace.write(steps=1_000_000, learner=learner, checkpoint={"every": 3}))
    run = LocalRun(config, workplace.run_folder)
    await run.start()
    waiting = asyncio.create_task(run.wait())
    async with asyncio.timeout(280):
        while (await run.status(wait_version=4, wait_s=60.0))["version"] < 4:
            assert not waiting.done()
        torchrun = psutil.Process(run.pids["learner"])
        (other,) = [p for p in torchrun.children() if p.environ().get("RANK") == "1"]
        other.kill()
        while (status := await run.status(wait_version=6, wait_s=1.0))["lineage"] == 0 or status["version"] < 6:
            assert not waiting.done()
    assert not torchrun.is_running()
    left = psutil.Process(run.pids["learner"]).children()
    await run.drain("enough")
    await waiting
    assert len(left) == 2 and not any(process.is_running() for process in left)
    assert (workplace.run_folder / "logs" / "learner-1.jsonl").is_file()


async def test_a_run_is_ended_in_order_from_the_command_line(workplace):
    config = load_config(workplace.write(steps=1_000_000, checkpoint={"every": 1000}))
    run = LocalRun(config, workplace.run_folder)
    await run.start()
    waiting = asyncio.create_task(run.wait())
    async with asyncio.timeout(280):
        while (await run.status(wait_version=2, wait_s=60.0))["version"] < 2:
            assert not waiting.done()
        done = await asyncio.to_thread(workplace.stretto, "drain", workplace.run_folder, "--reason", "enough")
        assert done.returncode == 0, done.stderr
        await waiting
    status = json.loads((workplace.run_folder / "status.json").read_text())
    assert (status["state"], status["stop_reason"]) == ("stopped", "enough")
    assert (workplace.run_folder / "checkpoints" / f"checkpoint-{status['version']}").is_dir()

"""The launcher with fake services as real processes: what is restarted, what ends a run, and that nothing stays."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.config import RunConfig, parse_config
from shared.errors import ConfigError, RunStopped
from stretto import launcher
from stretto.launcher import LocalRun

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, str(Path(__file__).parent / "fake_services.py"))
DEADLINE_S = 20.0

Make = Callable[..., LocalRun]


def config_of(folder: Path) -> RunConfig:
    return parse_config(
        {
            "model": "none",
            "folder": str(folder),
            "prompts_per_step": 1,
            "samples_per_prompt": 2,
            "steps": 1,
            "data": {"train": "none"},
            "reward": {"signals": [{"name": "exact", "function": "exact_match"}]},
        }
    )


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[str]) -> Make:
    """Makes a run whose services behave as told; they never leave by themselves."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("FAKE_FOLDER", str(tmp_path))
    monkeypatch.setattr(launcher, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(launcher, "STOP_S", 0.1)

    def run_of(**behaviour: str) -> LocalRun:
        monkeypatch.setenv("FAKE", json.dumps({name.replace("_", "-"): what for name, what in behaviour.items()}))
        return LocalRun(config_of(tmp_path), tmp_path / "run", on_event=events.append, program=PROGRAM)

    return run_of


async def finish(run: LocalRun) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await run.start()
        await run.wait()


def starts(folder: Path, instance: str) -> int:
    return len((folder / f"{instance}.starts").read_text())


def gone(processes: list[int]) -> bool:
    """Whether all processes, given by descriptors of them, end within a while."""
    return all(select.select([process], [], [], DEADLINE_S)[0] for process in processes)


async def test_a_service_that_crashes_twice_is_started_again_with_growing_pauses(
    make: Make, tmp_path: Path, events: list[str]
) -> None:
    await finish(make(rollout_0="crash 2"))
    assert starts(tmp_path, "rollout-0") == 3
    assert [e for e in events if "it fell over" in e] == [
        "rollout-0: it fell over; started again in 0.01 s",
        "rollout-0: it fell over; started again in 0.02 s",
    ]


async def test_a_service_that_leaves_a_running_run_is_started_again(make: Make, tmp_path: Path) -> None:
    await finish(make(reward_0="leave_early"))
    assert starts(tmp_path, "reward-0") == 2


async def test_a_service_that_never_comes_up_ends_the_run_with_its_own_sentence(make: Make, tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="rollout-0: it fell over"):
        await finish(make(rollout_0="crash 100"))
    assert starts(tmp_path, "rollout-0") == 1 + launcher.RESTARTS_IN_A_ROW


async def test_a_config_error_of_a_service_ends_the_run_without_a_restart(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        await finish(make(reward_0="config_error"))
    assert str(raised.value) == "reward-0: the key is wrong\n  in two lines"
    assert starts(tmp_path, "reward-0") == 1
    assert (tmp_path / "run" / "drained_because").read_text() == str(raised.value)


async def test_a_broker_that_cannot_start_ends_the_run_with_its_own_sentence(make: Make) -> None:
    run = make(broker="the dataset is empty")
    with pytest.raises(ConfigError, match=r"^broker: the dataset is empty$"):
        await finish(run)
    assert not run.pids


async def test_a_broker_that_was_killed_is_started_again_and_learns_of_the_drain(
    make: Make, tmp_path: Path, events: list[str]
) -> None:
    run = make()
    async with asyncio.timeout(DEADLINE_S):
        await run.start()
        waiting = asyncio.create_task(run.wait())
        os.kill(run.pids["broker"], signal.SIGKILL)
        while "broker" in run.pids:
            await asyncio.sleep(0.001)
        await run.drain("asked to")
        await waiting
    assert (tmp_path / "run" / "drained_because").read_text() == "asked to"
    assert events == ["broker was ended by SIGKILL; started again in 0.01 s"]


async def test_the_death_of_a_broker_without_a_journal_ends_the_run_with_a_clear_sentence(
    make: Make, tmp_path: Path
) -> None:
    make()  # sets the environment
    config = parse_config(config_of(tmp_path).model_dump(mode="json") | {"broker": {"journal": "off"}})
    run = LocalRun(config, tmp_path / "run", program=PROGRAM)
    async with asyncio.timeout(DEADLINE_S):
        await run.start()
        processes = [os.pidfd_open(pid) for pid in run.pids.values()]
        os.kill(run.pids["broker"], signal.SIGKILL)
        with pytest.raises(RunStopped, match=r"^broker was ended by SIGKILL$"):
            await run.wait()
    assert gone(processes)


async def test_a_drain_ends_the_run_in_order_and_leaves_no_process(make: Make, tmp_path: Path) -> None:
    run = make()
    async with asyncio.timeout(DEADLINE_S):
        await run.start()
        processes = [os.pidfd_open(pid) for pid in run.pids.values()]
        await run.drain("asked to")
        await run.wait()
    assert (tmp_path / "run" / "drained_because").read_text() == "asked to"
    assert len(processes) == 5 and gone(processes)


async def test_a_kill_ends_the_run_at_once_and_leaves_no_process(make: Make) -> None:
    run = make()
    async with asyncio.timeout(DEADLINE_S):
        await run.start()
        processes = [os.pidfd_open(pid) for pid in run.pids.values()]
        await run.kill()
        with pytest.raises(RunStopped, match="killed"):
            await run.wait()
    assert gone(processes)


async def test_a_run_that_is_drained_while_it_starts_ends(make: Make) -> None:
    run = make()
    async with asyncio.timeout(DEADLINE_S):
        starting = asyncio.create_task(run.start())
        await asyncio.sleep(0)  # let it begin
        await run.drain("changed my mind")
        with pytest.raises(RunStopped):
            await starting
    assert not run.pids


async def test_what_a_dead_service_left_behind_neither_delays_its_restart_nor_stays(make: Make, tmp_path: Path) -> None:
    await finish(make(reward_0="orphan"))
    assert starts(tmp_path, "reward-0") == 2
    orphan = Path("/proc", (tmp_path / "orphan").read_text(), "status")
    assert not orphan.exists() or "zombie" in orphan.read_text()


LAUNCH = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {here!r})
from test_launcher import PROGRAM, config_of
from stretto.launcher import LocalRun

async def main():
    folder = Path({folder!r})
    run = LocalRun(config_of(folder), folder / "run", program=PROGRAM)
    await run.start()
    print(*run.pids.values(), flush=True)
    await run.wait()

asyncio.run(main())
"""


def test_the_services_die_with_a_launcher_that_is_killed(make: Make, tmp_path: Path) -> None:
    make()  # sets the environment
    script = LAUNCH.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        services = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(services) == 5 and gone(services)


def test_costs_are_scored_by_services_of_their_own(tmp_path: Path) -> None:
    tree = config_of(tmp_path).model_dump()
    assert launcher.instances(parse_config(tree)) == ["broker", "broadcaster", "rollout-0", "reward-0", "learner"]
    tree |= {"algorithm": "safe_rlhf", "cost": {"replicas": 2, "signals": [{"name": "harm", "function": "length"}]}}
    assert {"cost-0", "cost-1"} <= set(launcher.instances(parse_config(tree)))


def test_services_show_metrics_at_ports_in_a_row_where_the_config_names_one(tmp_path: Path) -> None:
    tree = config_of(tmp_path).model_dump()
    assert launcher.metrics_address(parse_config(tree), "broker") == ""
    config = parse_config(tree | {"metrics": {"port": 9500}})
    addresses = [launcher.metrics_address(config, instance) for instance in launcher.instances(config)]
    assert addresses == [f"127.0.0.1:{port}" for port in range(9500, 9505)]


async def test_services_do_not_all_listen_where_the_environment_has_the_launcher_show_metrics(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_METRICS", "0.0.0.0:9500")  # as in the images
    run = make()
    await run.start()
    environment = Path(f"/proc/{run.pids['learner']}/environ").read_bytes().split(b"\0")
    await run.kill()
    assert b"STRETTO_METRICS=" in environment

"""deploy/slurm/run.sbatch, with programs in the place of stretto and srun that write down what they are asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "deploy/slurm/run.sbatch"
STRETTO = """#!/bin/bash
echo "stretto $* broker=${STRETTO_BROKER:-}" >>"$CALLS"
[[ $1 == train ]] || exit 0
trap 'echo drained >>"$CALLS"; exit 0' TERM
[[ -z ${FAILS:-} ]] || exit 3
echo '{"address": "tcp://10.0.0.7:4000", "pid": 1}' >"$FOLDER/broker.json"
touch "$FOLDER/journal.sqlite"
echo trains >>"$CALLS"
while true; do sleep 0.05; done
"""
SRUN = """#!/bin/bash
echo "srun $*" >>"$CALLS"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


class Slurm:
    """Starts jobs. calls: what was asked of the programs, line by line."""

    def __init__(self, folder: Path) -> None:
        self.run_folder = folder / "run"
        self._calls = folder / "calls"
        self._calls.touch()
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("stretto", STRETTO), ("srun", SRUN)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self._environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CALLS": str(self._calls),
            "FOLDER": str(self.run_folder),
        }

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()

    def job(self, nodes: int, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = ["bash", str(SCRIPT), "run.yaml", str(self.run_folder), *arguments]
        variables = self._environment | {"SLURM_NNODES": str(nodes)} | environment
        return subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def until(self, call: str, times: int = 1) -> None:
        """Wait until a line begins so."""
        end = time.monotonic() + 60
        while sum(line.startswith(call) for line in self.calls) < times:
            assert time.monotonic() < end, self.calls
            time.sleep(0.02)


@pytest.fixture
def slurm(tmp_path):
    return Slurm(tmp_path)


def test_shellcheck_finds_nothing():
    checked = [Path(sys.executable).with_name("shellcheck"), SCRIPT, SCRIPT.parents[1] / "docker/entrypoint.sh"]
    found = subprocess.run(checked, stdout=subprocess.PIPE, text=True)
    assert found.returncode == 0, found.stdout


def test_rollouts_are_on_the_other_nodes_and_find_the_broker_and_a_signal_ends_the_run_in_order(slurm):
    with slurm.job(3, "steps=7", ROLLOUTS_PER_NODE="4", SRUN_OPTIONS="--gpus-per-task=1 --mem=0") as job:
        slurm.until("stretto serve")
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 0
    train = (
        f"stretto train run.yaml broker.bind=tcp://0.0.0.0:0 rollout.replicas=0 steps=7 --run-folder {slurm.run_folder}"
    )
    assert any(call.startswith(train) and "--resume" not in call for call in slurm.calls)
    (srun,) = (call for call in slurm.calls if call.startswith("srun"))
    for option in ("--relative=1", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-task=1", "--mem=0"):
        assert f" {option} " in srun
    assert "stretto serve rollout broker=tcp://10.0.0.7:4000" in slurm.calls and "drained" in slurm.calls


def test_a_second_job_goes_on_with_the_run_and_none_runs_beside_another(slurm):
    with slurm.job(1) as first:
        slurm.until("trains")
        with slurm.job(1) as second:
            assert second.wait(60) == 1 and "still going on" in second.stderr.read()
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 0
    with slurm.job(1) as third:
        slurm.until("trains", times=2)
        third.send_signal(signal.SIGTERM)
        assert third.wait(60) == 0
    before, after = (call for call in slurm.calls if call.startswith("stretto train"))
    assert "--resume" not in before and "--resume" in after
    assert not any("replicas" in call or call.startswith("srun") for call in slurm.calls)  # one node has all


def test_a_run_that_fails_fails_the_job(slurm):
    with slurm.job(2, FAILS="1") as job:
        assert job.wait(60) == 3
    assert not any(call.startswith("srun") for call in slurm.calls)

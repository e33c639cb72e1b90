"""A run in real containers: rollouts are scaled from one to three and back, one is killed, and nothing is lost.

    python tests/containers/run.py [--compose "docker compose"] [--engine docker] [--no-build] [--json PATH]

Builds the image `cpu`, starts the compose file with the tiny model and a reward server of the user's in a container of
its own, and ends with the account of all groups.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

PROJECT = "stretto-test"
FILES = ["-f", "docker-compose.yml", "-f", "tests/containers/judge.yaml"]
STEPS = 150
DEADLINE_S = 600.0
CONFIG: dict[str, Any] = {
    "name": "run",
    "model": "tiny",
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "steps": STEPS,
    "data": {"train": "/config/train.jsonl"},
    "sampling": {"max_tokens": 24, "ignore_eos": True},
    "rollout": {"dtype": "float32", "max_samples": 8},
    "learner": {"dtype": "float32", "lr": 1e-3},
    "reward": {"signals": [{"name": "judge", "server": "http://judge:8000/score", "auth_env": "JUDGE_TOKEN"}]},
    "broker": {"bind": "tcp://0.0.0.0:5555", "heartbeat_s": 0.5},
}


class Stage:
    """The compose project, and how long its parts took."""

    def __init__(self, compose: str, engine: str, folder: Path) -> None:
        self._compose = shlex.split(compose)
        self.engine = shlex.split(engine)
        self._environment = os.environ | {
            "STRETTO_CONFIG_FOLDER": str(folder),
            "COMPOSE_PROJECT_NAME": PROJECT,
        }
        self.seconds: dict[str, float] = {}
        self._began = time.monotonic()

    def compose(self, *arguments: str, check: bool = True) -> str:
        """What a compose command prints."""
        done = subprocess.run(
            [*self._compose, "-p", PROJECT, *FILES, *arguments],
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            check=check,
        )
        return done.stdout

    def containers(self, service: str) -> list[str]:
        """The running containers of a service."""
        labels = {"com.docker.compose.project": PROJECT, "com.docker.compose.service": service}
        filters = [part for name, value in labels.items() for part in ("--filter", f"label={name}={value}")]
        names = [*self.engine, "ps", "--format", "{{.Names}}", *filters]
        return subprocess.run(names, stdout=subprocess.PIPE, text=True, check=True).stdout.split()

    def done(self, what: str) -> None:
        """Write down the time since the last call."""
        now = time.monotonic()
        self.seconds[what] = round(now - self._began, 1)
        self._began = now
        print(f"{what}: {self.seconds[what]} s", flush=True)

    def status(self) -> dict[str, Any]:
        """The run's status, {} while it has none."""
        asked = ["exec", "-T", "broker", "stretto", "status", "--broker", "tcp://127.0.0.1:5555", "--json"]
        try:
            found: dict[str, Any] = json.loads(self.compose(*asked, check=False))
        except ValueError:
            return {}
        return found

    def reach(self, condition: Any, what: str) -> dict[str, Any]:
        """Wait until the status is as wanted."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            status = self.status()
            if status and condition(status):
                self.done(what)
                return status
            time.sleep(1.0)
        raise SystemExit(f"not within {DEADLINE_S:g} s: {what}; the last status: {json.dumps(status)[:2000]}")

    def ended(self) -> dict[str, Any]:
        """Wait until the run is over; its last status."""
        end = time.monotonic() + DEADLINE_S
        while self.containers("broker"):
            if time.monotonic() > end:
                raise SystemExit(f"not over within {DEADLINE_S:g} s: {json.dumps(self.status())[:2000]}")
            time.sleep(1.0)
        self.done("the last versions")
        read = ["run", "--rm", "-T", "--no-deps", "--entrypoint", "cat", "keys", "/runs/run/status.json"]
        status: dict[str, Any] = json.loads(self.compose(*read))
        return status


def rollouts(status: dict[str, Any]) -> int:
    """How many rollouts generate."""
    return sum(s["service"] == "rollout" and s["state"] == "SERVING" for s in status["services"])


def main() -> None:
    """Run it, print the account, and fail where it does not add up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compose", default="docker compose", help="the compose command")
    parser.add_argument("--engine", default="docker", help="the container command")
    parser.add_argument("--no-build", action="store_true", help="the image is there")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(30) for b in range(30)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
        stage = Stage(args.compose, args.engine, folder)
        try:
            figures = play(stage, build=not args.no_build)
        finally:
            stage.compose("down", "--volumes", check=False)
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def play(stage: Stage, *, build: bool) -> dict[str, Any]:
    """The run; its figures."""
    if build:
        stage.compose("build", "keys")
        stage.done("build the image")
    stage.compose("run", "--rm", "keys", "models", "pull", "tiny")
    stage.done("make the model")
    stage.compose("up", "-d")
    stage.reach(lambda s: s["version"] >= 5, "start, to version 5")
    stage.compose("up", "-d", "--scale", "rollout=3", "--no-recreate")
    stage.reach(lambda s: rollouts(s) == 3, "three rollouts")
    victim = stage.containers("rollout")[-1]
    for command in ("kill", "rm"):
        subprocess.run([*stage.engine, command, victim], check=True, stdout=subprocess.DEVNULL)
    status = stage.reach(lambda s: any("not heard of" in w or "went back" in w for w in s["warnings"]), "one is missed")
    at = status["version"]
    stage.reach(lambda s: s["version"] >= at + 10, "10 versions more")
    stage.compose("up", "-d", "--scale", "rollout=1", "--no-recreate")
    for surplus in stage.containers("rollout")[1:]:  # podman-compose scales up only
        for command in ("stop", "rm"):
            subprocess.run([*stage.engine, command, surplus], check=True, stdout=subprocess.DEVNULL)
    stage.reach(lambda s: rollouts(s) == 1, "one rollout")
    status = stage.ended()
    account = status["groups"]["train"]
    accounted = account["consumed"] + account["dead"] + account["in_flight"] + sum(account["dropped"].values())
    assert account["admitted"] == accounted and account["dead"] == 0, account
    sizes = [*stage.engine, "images", "--format", "{{.Repository}}:{{.Tag}} {{.Size}}"]
    images = subprocess.run(sizes, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return {
        "seconds": stage.seconds,
        "groups": account,
        "version": status["version"],
        "images": [line for line in images if "stretto:" in line],
    }


if __name__ == "__main__":
    main()

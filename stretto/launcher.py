"""Runs all services of a run on this host: on their cores, started again when they fall, leaving nothing behind.

The command line and, later, the Python front door use `LocalRun`; it prints nothing.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.channel import Client
from protocol.messages import Drain, Ok, Status, StatusRequest
from shared.config import RunConfig, dump_config
from shared.cores import available_cores, plan_cores, process_environment
from shared.errors import ConfigError, RunStopped, StrettoError

START_S = 60.0
STOP_S = 20.0
DRAIN_S = 300.0
RESTARTS_IN_A_ROW = 5
STEADY_S = 60.0
"""A service that ran this long had a good start: its restarts count anew."""
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Child:
    """One service process and what is known of it."""

    instance: str
    service: str
    command: list[str]
    cores: tuple[int, ...]
    restartable: bool
    process: asyncio.subprocess.Process | None = None
    last_words: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    restarts: int = 0


class LocalRun:
    """A run whose services are all children of this process.

    on_event is called with one sentence about each restart and failure. folder: the run folder.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        resume: bool = False,
        on_event: Callable[[str], None] = lambda sentence: None,
        program: tuple[str, ...] = (sys.executable, "-m", "stretto"),
    ) -> None:
        """program: what runs a service when `serve SERVICE …` is appended (tests give another). Raises ConfigError."""
        self.folder = folder
        self._config = config
        self._resume = resume
        self._on_event = on_event
        self._program = list(program)
        self._children: list[Child] = []
        self._supervisors: list[asyncio.Task[None]] = []
        self._client: Client | None = None
        self._failure: str | None = None
        self._ending = False
        self._cores = plan_cores(config.cores, instances(config), available_cores())

    async def start(self) -> None:
        """Start the broker, then everything else. Raises ConfigError or StrettoError where the broker does not start."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(dump_config(self._config))
        (self.folder / "broker.json").unlink(missing_ok=True)
        self.started = time.time()
        broker = self._child("broker", "--config", str(self.folder / "config.yaml"), "--run-folder", str(self.folder))
        await self._spawn(broker)
        self._broker_done = asyncio.create_task(self._exit_of(broker), name="broker")
        address = await self._broker_address(broker)
        self._client = Client(address)
        for instance in instances(self._config)[1:]:
            extra = ["--resume"] if instance == "learner" and self._resume else []
            child = self._child(instance, "--broker", address, "--instance", instance, *extra)
            self._supervisors.append(asyncio.create_task(self._supervise(child), name=instance))

    async def status(self, *, wait_version: int | None = None, wait_s: float = 0.0) -> dict[str, Any]:
        """A snapshot of the run, after waiting for a version if asked to. Raises Unreachable without a broker."""
        assert self._client is not None
        request = StatusRequest(wait_version=wait_version, wait_ms=int(wait_s * 1000))
        status, _ = await self._client.request(request, Status, wait_s=wait_s, deadline_s=10.0)
        return status.status

    async def drain(self, reason: str) -> None:
        """Have the run end in order: the learner saves, everything stops."""
        if self._client is not None and not self._broker_done.done():
            await self._client.request(Drain(reason=reason), Ok, deadline_s=10.0)

    async def wait(self) -> None:
        """Until the run has ended. Raises RunStopped, with the reason, where it failed."""
        exit_code = await self._broker_done
        self._ending = True
        await asyncio.wait(self._supervisors, timeout=STOP_S)
        await self.kill()
        if self._failure is not None:
            raise RunStopped(self._failure)
        if exit_code != 0:
            raise RunStopped(self._words(self._children[0]) or f"the broker ended with exit code {exit_code}")

    async def kill(self) -> None:
        """End everything that still runs, at once. Safe to call at any time and again."""
        self._ending = True
        for child in self._children:
            if child.process is not None and child.process.returncode is None:
                _kill_group(child.process.pid)
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        for child in self._children:
            if child.process is not None:
                await child.process.wait()
        if self._client is not None:
            await self._client.close()
            self._client = None

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of what runs now."""
        return {c.instance: c.process.pid for c in self._children if c.process and c.process.returncode is None}

    def _child(self, instance: str, *arguments: str) -> Child:
        service = instance.rpartition("-")[0] or instance
        log_file = self.folder / "logs" / f"{instance}.jsonl"
        command = [*self._program, "serve", service, *arguments, "--log-file", str(log_file)]
        # Until a broker has a journal, neither it nor the learner can go on where it was.
        child = Child(instance, service, command, self._cores[instance], service not in ("broker", "learner"))
        self._children.append(child)
        return child

    async def _spawn(self, child: Child) -> None:
        child.last_words.clear()
        child.process = await asyncio.create_subprocess_exec(
            *child.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | process_environment(child.service, child.cores),
            start_new_session=True,
            preexec_fn=lambda: _in_child(child.cores),
        )

    async def _exit_of(self, child: Child) -> int:
        """Wait for a process to end, keeping its last words."""
        assert child.process is not None and child.process.stderr is not None
        while line := await child.process.stderr.readline():
            child.last_words.append(line.decode(errors="replace").rstrip())
        return await child.process.wait()

    async def _supervise(self, child: Child) -> None:
        while True:
            began = time.monotonic()
            await self._spawn(child)
            exit_code = await self._exit_of(child)
            if exit_code == 0 or self._ending or self._broker_done.done():
                return
            if time.monotonic() - began > STEADY_S:
                child.restarts = 0
            child.restarts += 1
            words = self._words(child) or f"{child.instance} ended with exit code {exit_code}"
            hopeless = exit_code == ConfigError.exit_code or not child.restartable
            if hopeless or child.restarts > RESTARTS_IN_A_ROW:
                await self._give_up(words)
                return
            pause_s = 2.0 ** (child.restarts - 1)
            self._on_event(f"{words}; started again in {pause_s:.0f} s")
            await asyncio.sleep(pause_s)

    async def _give_up(self, words: str) -> None:
        """A service cannot run: save what was trained, and end."""
        self._failure = self._failure or words
        self._on_event(words)
        try:
            await self.drain(words)
            await asyncio.wait([self._broker_done], timeout=DRAIN_S)
        except StrettoError as error:
            self._on_event(str(error))
        broker = self._children[0].process
        if broker is not None and broker.returncode is None:
            _kill_group(broker.pid)

    async def _broker_address(self, broker: Child) -> str:
        """The address that the broker wrote once it listened."""
        file = self.folder / "broker.json"
        end = time.monotonic() + START_S
        while not file.exists():
            if (await asyncio.wait([self._broker_done], timeout=0.02))[0]:
                exit_code = self._broker_done.result()
                kind = ConfigError if exit_code == ConfigError.exit_code else StrettoError
                raise kind(self._words(broker) or f"the broker ended with exit code {exit_code}")
            if time.monotonic() > end:
                await self.kill()
                raise StrettoError(
                    f"the broker did not start within {START_S:.0f} s; see {self.folder}/logs/broker.jsonl"
                )
        address: str = json.loads(file.read_text())["address"]
        return address

    @staticmethod
    def _words(child: Child) -> str:
        """The sentence that a service ended with: the last lines that it wrote to stderr under its own name."""
        prefix = f"{child.instance}: "
        lines = list(child.last_words)
        starts = [i for i, line in enumerate(lines) if line.startswith(prefix)]
        return "\n".join(lines[starts[-1] :]) if starts else (lines[-1] if lines else "")


def instances(config: RunConfig) -> list[str]:
    """The names of all services of a run, the broker first."""
    rollouts = [f"rollout-{i}" for i in range(config.rollout.replicas)]
    rewards = [f"reward-{i}" for i in range(config.reward.replicas)]
    return ["broker", "broadcaster", *rollouts, *rewards, "learner"]


def _in_child(cores: tuple[int, ...]) -> None:
    """In the new process, before it becomes the service: its cores, and its end should the launcher die."""
    os.sched_setaffinity(0, cores)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass

"""Runs all services of a run on this host: on their cores, started again when they fall, leaving nothing behind.

The command line and trainer.py use `LocalRun`; it prints nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol.channel import Client
from protocol.messages import Drain, Ok, Status, StatusRequest
from shared.algorithms import load_algorithm
from shared.config import RunConfig, dump_config
from shared.cores import available_cores, niceness, plan_cores, plan_gpus, process_environment
from shared.errors import ConfigError, ProtocolError, RunStopped, StrettoError, Unreachable
from shared.snapshot import PREFIX, shared_folder
from stretto.child import Child

BROKER_START_S = 300.0
"""Time for the broker to read the data and listen."""
STOP_S = 20.0
"""Time for the services to end by themselves, once the run has ended."""
DRAIN_S = 300.0
ANSWER_S = 30.0
FIRST_PAUSE_S = 1.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
RESTARTS_IN_A_ROW = 5


class LocalRun:
    """A run whose services are all children of this process.

    on_event is called with one sentence about each restart and failure. folder: the run folder. started: unix seconds.
    ended: whether the run is over, or being ended.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        on_event: Callable[[str], None] = lambda sentence: None,
        program: tuple[str, ...] = (sys.executable, "-m", "stretto"),
        steady_s: float = 60.0,
    ) -> None:
        """A run goes on where the one in its folder was.

        program: what runs a service when `serve SERVICE …` is appended (tests give another). steady_s: a service that
        ran this long had a good start, and its restarts count anew. Raises ConfigError.
        """
        self.folder = folder
        self.started = time.time()
        self._config = config
        self._on_event = on_event
        self._program = program
        self._cores = plan_cores(config.cores, instances(config), available_cores())
        self._gpus = plan_gpus(config.gpus, instances(config))
        self._children: dict[str, Child] = {}
        self._client: Client | None = None
        self._failure: StrettoError | None = None
        self._drain_reason: str | None = None
        self._broker_keeper: asyncio.Task[None] | None = None
        self._steady_s = steady_s
        self.ended = False
        self._run_id: str | None = None

    async def start(self) -> None:
        """Start the broker, then everything else.

        Raises ConfigError or StrettoError where the broker does not start, RunStopped where the run is ended meanwhile.
        """
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(dump_config(self._config))
        for left_over in ("broker.json", "status.json"):  # of the run that this one goes on with
            (self.folder / left_over).unlink(missing_ok=True)
        try:
            await self._spawn("broker")
            self._client = Client(await self._broker_address())
            for instance in instances(self._config)[1:]:
                await self._spawn(instance)
        except BaseException:
            await self.kill()
            raise

    async def wait(self) -> None:
        """Until the run has ended and no process of it is left. Raises RunStopped or ConfigError where it failed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                keepers = {name: tasks.create_task(self._keep(name), name=name) for name in instances(self._config)}
                self._broker_keeper = keepers.pop("broker")
                await asyncio.wait([self._broker_keeper])
                killed, self.ended = self.ended, True
                broker = self._children["broker"]
                if not broker.ended_the_run:  # without its goodbye the services would go on asking for it
                    for child in self._children.values():
                        child.terminate()
                await asyncio.wait(keepers.values(), timeout=STOP_S)
                for keeper in keepers.values():
                    keeper.cancel()
        finally:
            await self.kill()
        if self._failure is not None:
            raise self._failure
        if killed:
            raise RunStopped("the run was killed; go on with it by --resume")
        if not broker.succeeded:
            raise RunStopped(broker.last_words())

    async def drain(self, reason: str) -> None:
        """Have the run end in order: the learner saves, everything stops. A run that has not begun is killed.

        Raises Unreachable where the broker does not answer.
        """
        self._drain_reason = reason
        if self._client is None:
            await self.kill()
        elif self._children["broker"].running:  # or else once it has started again
            await self._client.request(Drain(reason=reason), Ok, deadline_s=ANSWER_S)

    async def kill(self) -> None:
        """End everything that still runs, at once. Safe to call at any time and again."""
        self.ended = True
        for child in self._children.values():
            child.kill()
        await asyncio.gather(*(child.wait() for child in self._children.values()))
        if self._run_id is not None:  # a learner that was killed could not remove its snapshots
            for file in shared_folder().glob(f"{PREFIX}{self._run_id}-*"):
                file.unlink(missing_ok=True)
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    async def status(self, *, wait_version: int | None = None, wait_s: float = 0.0) -> dict[str, Any]:
        """A snapshot of the run, after waiting for a version if asked to. Raises Unreachable without a broker."""
        if self._client is None:
            raise Unreachable("the run has no broker (any more)")
        request = StatusRequest(wait_version=wait_version, wait_ms=int(wait_s * 1000))
        status, _ = await self._client.request(request, Status, wait_s=wait_s, deadline_s=ANSWER_S)
        return status.status

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of what runs now."""
        return {name: child.pid for name, child in self._children.items() if child.running}

    async def _spawn(self, instance: str) -> None:
        if self.ended:
            raise RunStopped("the run was ended before it had begun")
        service = instance.rpartition("-")[0] or instance
        logs = self.folder / "logs"
        arguments = [*self._arguments(instance), "--log-file", str(logs / f"{instance}.jsonl")]
        ranks = self._config.learner.ranks if service == "learner" else 1
        program, cores = self._program, self._cores[instance]
        if ranks > 1:
            program = (*TORCHRUN, f"--nproc-per-node={ranks}", *program[1:])
        self._children[instance] = await Child.start(
            instance,
            [*program, "serve", service, *arguments],
            environment=process_environment(service, cores, self._gpus.get(instance), processes=ranks)
            | {"STRETTO_METRICS": metrics_address(self._config, instance)},
            cores=cores,
            niceness=niceness(instance, self._cores),
            output=logs / f"{instance}.out",
        )

    def _arguments(self, instance: str) -> list[str]:
        if instance == "broker":
            return ["--config", str(self.folder / "config.yaml"), "--run-folder", str(self.folder)]
        assert self._client is not None
        return ["--broker", self._client.address, "--instance", instance]

    async def _broker_address(self) -> str:
        """The address that the broker wrote once it listened."""
        broker, file = self._children["broker"], self.folder / "broker.json"
        ended = asyncio.create_task(broker.wait(), name="broker")
        end = time.monotonic() + BROKER_START_S
        while not file.exists():
            await asyncio.wait([ended], timeout=0.02)
            if self.ended:
                raise RunStopped("the run was ended before it had begun")
            if ended.done():
                raise (ConfigError if broker.hopeless else StrettoError)(broker.last_words())
            if time.monotonic() > end:
                raise StrettoError(f"the broker did not listen within {BROKER_START_S:.0f} s; see {self.folder}/logs")
        announced = json.loads(file.read_text())
        self._run_id = announced["run_id"]
        address: str = announced["address"]
        return address

    async def _keep(self, instance: str) -> None:
        """Start a service again whenever it ends while the run goes on; give the run up where that does not help."""
        failures = 0
        while True:
            child, began = self._children[instance], time.monotonic()
            await child.wait()
            if await self._is_over():
                return
            failures = 1 if time.monotonic() - began > self._steady_s else failures + 1
            words = child.last_words()
            forgets = instance == "broker" and self._config.broker.journal == "off"
            if child.hopeless or forgets or failures > RESTARTS_IN_A_ROW:
                await self._give_up(instance, ConfigError(words) if child.hopeless else RunStopped(words))
                return
            pause_s = FIRST_PAUSE_S * 2 ** (failures - 1)
            self._on_event(f"{words}; started again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            if await self._is_over():
                return
            await (self._respawn_broker() if instance == "broker" else self._spawn(instance))

    async def _respawn_broker(self) -> None:
        """Start the broker again, where the services look for it, and tell it what it may not know."""
        assert self._client is not None
        (self.folder / "broker.json").unlink(missing_ok=True)
        await self._spawn("broker")
        try:
            address = await self._broker_address()
            if address != self._client.address:
                self._on_event(f"the broker listens at {address} now: another program took {self._client.address}")
                self._children["broker"].kill()
            elif self._drain_reason is not None:
                await self.drain(self._drain_reason)
        except StrettoError as error:
            self._on_event(str(error))

    async def _is_over(self) -> bool:
        """Whether the run ends or has ended, so that a service may leave."""
        broker = self._children["broker"]
        if self.ended or broker.ended_the_run:
            return True
        if not broker.running:
            return False
        try:
            status = await self.status()
        except (Unreachable, ProtocolError):
            return broker.ended_the_run
        return status["stop_reason"] is not None or status["state"] == "draining"

    async def _give_up(self, instance: str, failure: StrettoError) -> None:
        """A service cannot run: have the learner save what it has, and the run end with this failure."""
        self._failure = self._failure or failure
        self._on_event(str(failure))
        if instance == "broker":
            return
        assert self._broker_keeper is not None
        try:
            await self.drain(str(failure))
            await asyncio.wait([self._broker_keeper], timeout=DRAIN_S)
        except StrettoError:
            pass
        if not self._broker_keeper.done():
            self.ended = True
            self._children["broker"].kill()


def metrics_address(config: RunConfig, instance: str) -> str:
    """Where a service of a run shows its metrics, as host:port; empty: nowhere."""
    port = config.metrics.port
    return "" if port is None else f"127.0.0.1:{port + instances(config).index(instance)}"


def instances(config: RunConfig) -> list[str]:
    """The names of all services of a run, the broker first and the learner last."""
    stages = [stage.name for stage in load_algorithm(config.algorithm).stages(config)]
    names = ["broker", "broadcaster"]
    for stage in stages:
        settings = config.scoring[stage][0] if stage in config.scoring else getattr(config, stage, None)
        replicas = getattr(settings, "replicas", None)
        names += [stage] if replicas is None else [f"{stage}-{i}" for i in range(replicas)]
    return names

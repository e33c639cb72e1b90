"""The broker's server: carries requests to the ledger, and its events to the run folder; keeps deadlines."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol.channel import Reply, Server
from protocol.codec import Message, join_groups
from protocol.events import EventPublisher
from protocol.messages import (
    PROTOCOL_VERSION,
    Checkpointed,
    Commit,
    Complete,
    Drain,
    Event,
    Fail,
    Heartbeat,
    Hello,
    Lease,
    Leased,
    LeaseRequest,
    Leave,
    Locate,
    Located,
    Ok,
    Pulse,
    Resume,
    Resumed,
    Status,
    StatusRequest,
    Welcome,
)
from services.broker import outcomes
from services.broker.dataset import read_dataset
from services.broker.evaluation import Evaluations
from services.broker.gate import Policy
from services.broker.ledger import Grant, Ledger
from services.broker.pace import Pace
from services.broker.prompts import PromptSource, first_prompts, total_steps
from services.broker.roster import Roster
from services.broker.runlog import RunLog
from shared.algorithms import load_algorithm
from shared.config import RunConfig
from shared.errors import DataError, ProtocolError, RunStopped, StrettoError
from shared.graph import check_graph
from shared.group import Lane, TrajectoryGroup, mean_reward
from shared.log import log

GOODBYE_S = 10.0
"""How long the broker stays after the end of a run, for services and viewers to see it."""
SHOWN_DEAD_LETTERS = 20
"""How many the status shows, so that it stays within a message; the run folder has them all."""
MAX_WAIT_MS = 600_000


class Broker:
    """One run. state: `running`, `draining`, `finished`, `stopped` (on request) or `failed`."""

    def __init__(self, config: RunConfig, run_folder: Path) -> None:
        """Reads the data and binds the address. Raises ConfigError or DataError where that cannot work."""
        algorithm = load_algorithm(config.algorithm)
        algorithm.check(config)
        stages = check_graph(algorithm.stages(config))
        train = read_dataset(config.data.train, split=config.data.split, prompt_field=config.data.prompt_field)
        self.config = config
        self.run_folder = run_folder.resolve()
        self.total_steps = total_steps(len(train), config.prompts_per_step, config.steps, config.epochs)
        if self.total_steps == 0:
            raise DataError(
                f"{config.data.train} has {len(train)} rows; in {config.epochs} epochs that is not one step of "
                f"{config.prompts_per_step} prompts"
            )
        self._source = PromptSource(train, seed=config.seed, shuffle=config.data.shuffle)
        self._evaluations = Evaluations(config, self._heldout(), self.total_steps)
        self._ledger = Ledger(stages, Policy.of(config, self.total_steps))
        self._stages = {stage.name: stage for stage in stages}
        self._samples: dict[Lane, int] = {"train": config.samples_per_prompt, "eval": 1}
        self._roster = Roster(config.broker.heartbeat_s)
        self._runlog = RunLog(self.run_folder)
        self._epoch = os.urandom(8).hex()
        self.run_id = f"{config.name}-{self._epoch}"
        self._changed = asyncio.Condition()
        self._server = Server(config.broker.bind, self.handle)
        host = config.broker.bind.rpartition(":")[0]
        self._events = EventPublisher(f"{host}:0")
        self.state = "running"
        self.stop_reason: str | None = None
        self._started = time.time()
        self._progress_at = time.monotonic()
        self._saved_version = 0
        self._outcome = ("stopped", "")
        self._metrics: dict[str, float] = {}
        self._history: deque[dict[str, Any]] = deque(maxlen=200)
        self._staleness = 0
        self._pace = Pace()
        self._replaced: list[TrajectoryGroup] = []
        self._dead_letters: deque[dict[str, Any]] = deque(maxlen=SHOWN_DEAD_LETTERS)
        self._warnings: deque[str] = deque(maxlen=20)

    def _heldout(self) -> list[Any]:
        data = self.config.data
        if data.heldout is None:
            return []
        heldout = read_dataset(data.heldout, split=data.heldout_split, prompt_field=data.prompt_field)
        return first_prompts(heldout, self.config.evaluation.prompts)

    @property
    def address(self) -> str:
        """The address that services are given."""
        return self.config.broker.advertise or self._server.address

    async def run(self) -> None:
        """Serve until the run has ended. Raises RunStopped where it failed."""
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._server.run(), name="requests")
            await self._watch()
            await self._say_goodbye()
            serving.cancel()
        self._runlog.status(self.status())
        self._runlog.close()
        self._events.close()
        if self.state == "failed":
            raise RunStopped(str(self.stop_reason))

    async def _say_goodbye(self) -> None:
        """Wait until all services have seen that the run is over, or are taken for gone."""
        try:
            async with asyncio.timeout(GOODBYE_S), self._changed:
                await self._changed.wait_for(lambda: len(self._roster) == 0)
        except TimeoutError:
            log.warning("services did not leave in time", left=[m["instance"] for m in self._roster.status(0.0)])

    # Requests

    async def handle(self, message: Message) -> Reply:
        """The answer to a request."""
        match message.body:
            case Heartbeat() as beat:
                return await self._beat(beat)
            case LeaseRequest() as request:
                return await self._lease(request)
            case Complete() as done:
                return await self._complete(done, message)
            case Fail() as failure:
                failed = self._ledger.fail(failure.group_id, failure.lease_id, failure.error, retry=failure.retry)
                return await self._apply(failed)
            case Commit() as commit:
                return await self._commit(commit)
            case Hello() as hello:
                return await self._hello(hello)
            case Locate() as locate:
                return await self._locate(locate)
            case StatusRequest() as request:
                return await self._status(request)
            case Checkpointed() as saved:
                self._saved_version = saved.version
                log.info("checkpoint", version=saved.version, location=saved.location)
                return await self._apply([])
            case Resume() as resume:
                lineage = self._ledger.resume(resume.version)
                self._saved_version = resume.version
                self._source.position = resume.version * self.config.prompts_per_step
                log.info("resumed", version=resume.version, location=resume.location)
                return Resumed(lineage=lineage)
            case Drain() as drain:
                self._begin_end("stopped", drain.reason)
                return await self._apply([])
            case Leave() as leave:
                return await self._leave(leave)
        raise ProtocolError("unknown_type", f"the broker does not answer {message.body.type}")

    async def _hello(self, hello: Hello) -> Welcome:
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolError("bad_version", f"{hello.instance} speaks {hello.protocol}, not {PROTOCOL_VERSION}")
        if hello.instance in self._roster:  # restarted faster than it was missed
            await self._apply(self._ledger.release(hello.instance, "started again"))
        self._roster.join(hello, time.monotonic())
        log.info("hello", instance=hello.instance, host=hello.host, pid=hello.pid)
        await self._notify()
        return Welcome(
            run_id=self.run_id,
            run_folder=str(self.run_folder),
            config=self.config.model_dump(mode="json"),
            lineage=self._ledger.lineage,
            version=self._ledger.version,
            total_steps=self.total_steps,
            heartbeat_s=self.config.broker.heartbeat_s,
            broker_epoch=self._epoch,
            events_address=self._events.address,
        )

    async def _beat(self, beat: Heartbeat) -> Pulse:
        now = time.monotonic()
        self._require_member(beat.instance)
        try:
            self._roster.beat(beat.instance, beat.state, beat.version, beat.stats, now)
            for start, end, bucket in beat.stats.get("spans", []):
                span = {"instance": beat.instance, "start": float(start), "end": float(end), "bucket": str(bucket)}
                self._runlog.write("spans", span)
        except (TypeError, ValueError, AttributeError) as error:
            raise ProtocolError("bad_header", f"stats of {beat.instance}: {error}") from None
        self._ledger.extend(beat.instance, now)
        await self._notify()
        return Pulse(
            lineage=self._ledger.lineage,
            version=self._ledger.version,
            broker_epoch=self._epoch,
            draining=self.state == "draining",
            stop_reason=self.stop_reason,
        )

    async def _locate(self, locate: Locate) -> Located:
        await self._until(lambda: self._roster.address(locate.service) is not None, locate.wait_ms)
        return Located(address=self._roster.address(locate.service))

    async def _lease(self, request: LeaseRequest) -> Reply:
        if request.stage not in self._stages:
            raise ProtocolError(
                "bad_header", f"there is no stage {request.stage!r}; there are {', '.join(self._stages)}"
            )
        grants: list[Grant] = []
        session = self._roster.session(request.instance)

        def answered() -> bool:
            # Who said hello again meanwhile asks anew: what this request were given might go to a process that died.
            if self._roster.session(request.instance) is not session:
                return True
            if self.state != "running" and not self._stages[request.stage].provides:
                raise ProtocolError("draining", "the run ends: save and leave")
            if session is not None and self.stop_reason is None:
                grants.extend(self._try_lease(request))
            return bool(grants)

        await self._until(answered, request.wait_ms)
        needs = self._stages[request.stage].needs
        leases = [
            Lease(
                lease_id=grant.lease_id,
                group_id=grant.entry.group.group_id,
                attempt=grant.attempt,
                lease_s=self.config.broker.lease_s,
                lane=grant.entry.group.lane,
                min_version=grant.entry.group.min_version,
                prompt=grant.entry.group.prompt.to_wire() if self._stages[request.stage].provides else None,
            )
            for grant in grants
        ]
        columns = [{name: grant.entry.group.columns[name] for name in needs} for grant in grants]
        return Leased(leases=leases), join_groups(columns)

    def _try_lease(self, request: LeaseRequest) -> list[Grant]:
        max_groups = request.max_groups
        if not self._stages[request.stage].needs:
            max_groups = min(max_groups, self._admit(request))
        return self._ledger.lease(
            request.stage,
            request.instance,
            time.monotonic(),
            max_groups=max(1, max_groups),
            min_groups=request.min_groups,
            version=self._roster.version(request.instance),
            max_samples=request.max_samples,
            samples=self._samples,
        )

    def _admit(self, request: LeaseRequest) -> int:
        """Admit what a rollout asks for as far as the gate allows; returns its share of what there is to generate."""
        self._admit_evaluation()
        wanted = request.max_groups
        if request.max_samples is not None:
            wanted = min(wanted, request.max_samples // self._samples["train"])
        room = self._ledger.room() if self.state == "running" else 0
        waiting = self._ledger.waiting(request.stage)
        rollouts = max(1, len(self._roster.of("rollout")))
        share = -(-(waiting["train"] + room) // rollouts)
        for _ in range(min(room, min(wanted, share) - waiting["train"])):
            self._ledger.admit("train", self._source.draw())
        return share + waiting["eval"]

    def _admit_evaluation(self) -> None:
        for prompt in self._evaluations.due(self._ledger.version):
            self._ledger.admit("eval", prompt)

    async def _complete(self, done: Complete, message: Message) -> Ok:
        # The frames belong to ZeroMQ's buffers, of which small ones share memory: own copies let go of them.
        columns = {name: array.copy() for name, array in message.columns.items()}
        happened = self._ledger.complete(done.group_id, done.lease_id, columns)
        self._pace.generated(len(columns.get("tokens", ())))
        self._progress_at = time.monotonic()
        return await self._apply(happened)

    async def _commit(self, commit: Commit) -> Ok:
        if commit.lineage != self._ledger.lineage:
            raise ProtocolError("unknown_lease", f"lineage {commit.lineage}; the run is at {self._ledger.lineage}")
        groups, happened = self._ledger.commit(commit.version, commit.group_ids)
        if any(self._ledger.balance().values()):
            raise StrettoError(f"the accounts of version {commit.version} do not balance: {self._ledger.accounts()}")
        now = time.time()
        self._pace.committed(now, sum(group.n_samples for group in groups))
        self._staleness = max((commit.version - 1 - group.oldest_version() for group in groups), default=0)
        self._metrics = dict(commit.metrics) | {
            "reward/generated": mean_reward([*groups, *self._replaced]),
            "replaced/groups": float(len(self._replaced)),
        }
        self._replaced.clear()
        record = self._metrics | {"version": commit.version, "lineage": commit.lineage, "time": now}
        self._history.append(record)
        self._runlog.write("metrics", record)
        for group in groups:
            self._runlog.group(group, commit.version)
        self._progress_at = time.monotonic()
        self._admit_evaluation()
        self._publish("version")
        return await self._apply(happened)

    async def _status(self, request: StatusRequest) -> Status:
        if request.wait_version is not None:
            version = request.wait_version
            await self._until(lambda: self._ledger.version >= version or self.stop_reason is not None, request.wait_ms)
        return Status(status=self.status())

    async def _leave(self, leave: Leave) -> Ok:
        self._roster.leave(leave.instance)
        log.info("left", instance=leave.instance, error=leave.error)
        if leave.error is not None:
            self._warnings.append(f"{leave.instance} left: {leave.error}")
        return await self._apply(self._ledger.release(leave.instance, leave.error or "left"))

    def _require_member(self, instance: str) -> None:
        if instance not in self._roster:
            raise ProtocolError("not_member", f"{instance[:64]!r} is not a member: say hello")

    # What follows

    async def _apply(self, happened: list[outcomes.Outcome]) -> Ok:
        self._take(happened)
        self._end_if_done()
        await self._notify()
        return Ok()

    def _take(self, happened: list[outcomes.Outcome]) -> None:
        """Write down what happened in the ledger, and do what follows from it."""
        for outcome in happened:
            match outcome:
                case outcomes.Evaluated(group, scheduled):
                    self._runlog.group(group, scheduled)
                    self._take_result(self._evaluations.add(group, scheduled))
                case outcomes.Dropped(group, reason):
                    self._source.give_back(group.prompt)
                    log.info("dropped", group=group.group_id, reason=reason)
                case outcomes.Replaced(group):
                    self._replaced.append(group)
                    self._runlog.group(group, None)
                case outcomes.Dead(group, stage, errors):
                    letter = {
                        "group_id": group.group_id,
                        "stage": stage,
                        "row": group.prompt.row,
                        "errors": list(errors),
                    }
                    self._dead_letters.append(letter)
                    self._runlog.write("dead_letters", {"prompt": group.prompt.text} | letter)
                    log.error("dead letter", **letter)
                    if group.lane == "eval":
                        self._take_result(self._evaluations.lose(group.min_version))
                case outcomes.Returned(group_id, stage, holder, reason):
                    self._warnings.append(f"group {group_id} went back to the queue of {stage}: {holder} {reason}")
                    log.warning("returned", group=group_id, stage=stage, holder=holder, reason=reason)
                case outcomes.SystematicFault(stage, deaths, last_error):
                    self._begin_end(
                        "failed", f"{deaths} groups in a row failed at the stage {stage}; the last: {last_error}"
                    )

    def _take_result(self, result: dict[str, Any] | None) -> None:
        if result is not None:
            self._runlog.write("evaluations", {"time": time.time()} | result)
            log.info("evaluated", **result)

    def _end_if_done(self) -> None:
        saved = self._saved_version == self._ledger.version
        if self.state == "running" and self._ledger.version >= self.total_steps:
            if saved and self._evaluations.complete(self.total_steps):
                self._stop("finished", f"all {self.total_steps} steps are done")
        elif self.state == "draining" and (saved or not self._roster.of("learner")):
            self._stop(*self._outcome)

    def _begin_end(self, state: str, reason: str) -> None:
        """Admit nothing more; the run ends in this state once the learner has saved what it trained."""
        if self.state == "running":
            self.state, self._outcome = "draining", (state, reason)
            log.info("draining", outcome=state, reason=reason)
            self._publish("drain")

    def _stop(self, state: str, reason: str) -> None:
        if self.stop_reason is None:
            self.state, self.stop_reason = state, reason
            log.info("run ends", state=state, reason=reason)

    async def _watch(self) -> None:
        """Watch deadlines until the run has ended."""
        while self.stop_reason is None:
            now = time.monotonic()
            happened = self._ledger.expire(now)
            for instance in self._roster.silent(now):
                self._roster.leave(instance)
                self._warnings.append(f"{instance} was not heard of any more")
                log.warning("gone", instance=instance)
                happened += self._ledger.release(instance, "not heard of any more")
            self._check_progress(now)
            await self._apply(happened)
            await self._until(lambda: self.stop_reason is not None, int(self.config.broker.heartbeat_s * 500))
        self._runlog.status(self.status())
        self._publish("shutdown")

    def _check_progress(self, now: float) -> None:
        patience_s = self.config.broker.progress_s
        if now - self._progress_at > patience_s:
            roles = ("rollout", "reward", "learner", "broadcaster")
            missing = [service for service in roles if not self._roster.of(service)]
            waits = f"no {' and no '.join(missing)} is there" if missing else f"bottleneck: {self._roster.bottleneck()}"
            self._stop("failed", f"no group and no step was finished in {patience_s:.0f} s; {waits}")

    def _publish(self, kind: Any) -> None:
        self._events.publish(Event(kind=kind, lineage=self._ledger.lineage, version=self._ledger.version))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, condition: Callable[[], bool], wait_ms: int) -> None:
        """Wait until a condition on the state holds, or the time is over."""
        if condition():
            return
        try:
            async with asyncio.timeout(min(wait_ms, MAX_WAIT_MS) / 1000), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            pass

    # Status

    def status(self) -> dict[str, Any]:
        """A snapshot of the run, of plain values; the keys are described in protocol/SPEC.md."""
        return {
            "run_id": self.run_id,
            "name": self.config.name,
            "run_folder": str(self.run_folder),
            "state": self.state,
            "stop_reason": self.stop_reason,
            "started": self._started,
            "version": self._ledger.version,
            "steps": self.total_steps,
            "lineage": self._ledger.lineage,
            "groups": self._ledger.accounts(),
            "staleness": self._staleness,
            "metrics": self._metrics,
            "history": list(self._history),
            "evaluations": self._evaluations.results,
            "services": self._roster.status(time.monotonic()),
            "departed": self._roster.departed(time.monotonic()),
            "bottleneck": self._roster.bottleneck(),
            "dead_letters": list(self._dead_letters),
            "warnings": list(self._warnings),
            "saved_version": self._saved_version,
            "prompts_drawn": self._source.position,
            "refused_messages": dict(self._server.refused),
            **self._pace.figures(self.total_steps - self._ledger.version),
        }


async def serve(config: RunConfig, run_folder: Path, *, on_bound: Callable[[str, str], None]) -> None:
    """Run the broker of a run until the run has ended. `on_bound` is told address and run id once it listens.

    Raises ConfigError or DataError where the run cannot begin, RunStopped where it failed.
    """
    broker = Broker(config, run_folder)
    on_bound(broker.address, broker.run_id)
    await broker.run()

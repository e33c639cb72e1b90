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
from services.broker.columns import check_columns
from services.broker.dataset import read_dataset
from services.broker.evaluation import Evaluations
from services.broker.gate import Policy
from services.broker.ledger import Grant, Ledger
from services.broker.prompts import PromptSource, first_prompts, total_steps
from services.broker.roster import Roster
from services.broker.runlog import RunLog
from shared.algorithms import load_algorithm
from shared.config import RunConfig
from shared.errors import DataError, ProtocolError, RunStopped, StrettoError
from shared.graph import check_graph
from shared.group import Lane
from shared.log import log

GOODBYE_S = 10.0
"""How long the broker stays after the end of a run, for services and viewers to see it."""
RATE_WINDOW = 20


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
        self._changed = asyncio.Condition()
        self._server = Server(config.broker.bind, self.handle)
        host = config.broker.bind.rpartition(":")[0]
        self._events = EventPublisher(f"{host}:0")
        self.state = "running"
        self.stop_reason: str | None = None
        self._started = time.time()
        self._progress_at = time.monotonic()
        self._saved_version = -1
        self._metrics: dict[str, float] = {}
        self._history: deque[dict[str, Any]] = deque(maxlen=200)
        self._commits: deque[tuple[float, int, int]] = deque(maxlen=RATE_WINDOW + 1)
        self._generated_tokens = 0
        self._dead_letters: deque[dict[str, Any]] = deque(maxlen=100)
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
                return await self._apply(
                    self._ledger.fail(
                        failure.group_id, _stage_of(failure), failure.lease_id, failure.error, retry=failure.retry
                    )
                )
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
                self._source.position = resume.version * self.config.prompts_per_step
                log.info("resumed", version=resume.version, location=resume.location)
                return Resumed(lineage=lineage)
            case Drain() as drain:
                return await self._drain(drain.reason)
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
            run_id=f"{self.config.name}-{self._epoch}",
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
                self._runlog.write("spans", instance=beat.instance, start=start, end=end, bucket=bucket)
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

        def granted() -> bool:
            self._require_member(request.instance)
            if self.state == "draining" and not self._stages[request.stage].provides:
                raise ProtocolError("draining", "the run ends: save and leave")
            if self.stop_reason is None:
                grants.extend(self._try_lease(request))
            return bool(grants)

        await self._until(granted, request.wait_ms)
        needs = self._stages[request.stage].needs
        leases = [
            Lease(
                lease_id=grant.lease_id,
                group_id=grant.entry.group.group_id,
                attempt=grant.attempt,
                lease_s=self.config.broker.lease_s,
                lane=grant.entry.group.lane,
                min_version=grant.entry.group.min_version,
                prompt=grant.entry.group.prompt.to_wire(),
            )
            for grant in grants
        ]
        columns = [{name: grant.entry.group.columns[name] for name in needs} for grant in grants]
        return Leased(leases=leases), join_groups(columns)

    def _try_lease(self, request: LeaseRequest) -> list[Grant]:
        max_groups = request.max_groups
        if not self._stages[request.stage].needs:
            max_groups = min(max_groups, self._admit(request))
        grants, events = self._ledger.lease(
            request.stage,
            request.instance,
            time.monotonic(),
            max_groups=max(1, max_groups),
            min_groups=request.min_groups,
            version=self._roster.version(request.instance),
            max_samples=request.max_samples,
            samples=self._samples,
        )
        self._take(events)
        return grants

    def _admit(self, request: LeaseRequest) -> int:
        """Admit what a rollout asks for as far as the gate allows; returns its share of what there is to generate."""
        for prompt in self._evaluations.due(self._ledger.version):
            self._ledger.admit("eval", prompt)
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

    async def _complete(self, done: Complete, message: Message) -> Ok:
        stage = _stage_of(done)
        group = self._ledger.group(done.group_id)
        if group is not None:
            check_columns(group, message.columns)
        # The frames belong to ZeroMQ's buffers, of which small ones share memory: own copies let go of them.
        columns = {name: array.copy() for name, array in message.columns.items()}
        events = self._ledger.complete(done.group_id, stage, columns)
        if not self._stages[stage].needs:
            self._generated_tokens += len(columns["tokens"])
        self._progress_at = time.monotonic()
        return await self._apply(events)

    async def _commit(self, commit: Commit) -> Ok:
        if commit.lineage != self._ledger.lineage:
            raise ProtocolError("unknown_lease", f"lineage {commit.lineage}; the run is at {self._ledger.lineage}")
        groups = self._ledger.commit(commit.version, commit.group_ids)
        if any(self._ledger.balance().values()):
            raise StrettoError(f"the accounts of version {commit.version} do not balance: {self._ledger.accounts()}")
        now = time.time()
        self._commits.append((now, sum(g.n_samples for g in groups), self._generated_tokens))
        self._metrics = dict(commit.metrics)
        self._history.append({"version": commit.version, "time": now, **self._metrics})
        self._runlog.write("metrics", version=commit.version, time=now, lineage=commit.lineage, **self._metrics)
        for group in groups:
            self._runlog.group(group, commit.version)
        self._progress_at = time.monotonic()
        await self._publish("version")
        return await self._apply([])

    async def _status(self, request: StatusRequest) -> Status:
        if request.wait_version is not None:
            version = request.wait_version
            await self._until(lambda: self._ledger.version >= version or self.stop_reason is not None, request.wait_ms)
        return Status(status=self.status())

    async def _drain(self, reason: str) -> Ok:
        if self.state == "running":
            self.state = "draining"
            self._drain_reason = reason
            log.info("draining", reason=reason)
            await self._publish("drain")
        return await self._apply([])

    async def _leave(self, leave: Leave) -> Ok:
        self._roster.leave(leave.instance)
        log.info("left", instance=leave.instance, error=leave.error)
        if leave.error is not None:
            self._warnings.append(f"{leave.instance} left: {leave.error}")
        return await self._apply(self._ledger.release(leave.instance, leave.error or "left"))

    def _require_member(self, instance: str) -> None:
        if instance not in self._roster:
            raise ProtocolError("not_member", f"{instance[:64]!r} is not a member: say hello")

    # What follows from events

    async def _apply(self, events: list[outcomes.Outcome]) -> Ok:
        self._take(events)
        self._end_if_done()
        await self._notify()
        return Ok()

    def _take(self, events: list[outcomes.Outcome]) -> None:
        """Write down what happened in the ledger, and do what follows from it."""
        for event in events:
            match event:
                case outcomes.Evaluated(group, scheduled):
                    self._runlog.group(group, scheduled)
                    self._take_result(self._evaluations.add(group, scheduled))
                case outcomes.Dropped(group, reason):
                    self._source.give_back(group.prompt)
                    log.info("dropped", group=group.group_id, reason=reason)
                case outcomes.Dead(group, stage, errors):
                    letter = {
                        "group_id": group.group_id,
                        "stage": stage,
                        "row": group.prompt.row,
                        "errors": list(errors),
                    }
                    self._dead_letters.append(letter)
                    self._runlog.write("dead_letters", prompt=group.prompt.text, **letter)
                    log.error("dead letter", **letter)
                    if group.lane == "eval":
                        self._take_result(self._evaluations.lose(group.min_version))
                case outcomes.Returned(group_id, stage, holder, reason):
                    self._warnings.append(f"group {group_id} went back to the queue of {stage}: {holder} {reason}")
                    log.warning("returned", group=group_id, stage=stage, holder=holder, reason=reason)
                case outcomes.SystematicFault(stage, deaths, last_error):
                    self._stop(
                        "failed", f"{deaths} groups in a row failed at the stage {stage}; the last: {last_error}"
                    )

    def _take_result(self, result: dict[str, Any] | None) -> None:
        if result is not None:
            self._runlog.write("evaluations", time=time.time(), **result)
            log.info("evaluated", **result)

    def _end_if_done(self) -> None:
        saved = self._saved_version == self._ledger.version
        if self.state == "running" and self._ledger.version >= self.total_steps:
            if saved and self._evaluations.complete(self.total_steps):
                self._stop("finished", f"all {self.total_steps} steps are done")
        elif self.state == "draining" and (saved or not self._roster.of("learner")):
            self._stop("stopped", self._drain_reason)

    def _stop(self, state: str, reason: str) -> None:
        if self.stop_reason is None:
            self.state, self.stop_reason = state, reason
            log.info("run ends", state=state, reason=reason)

    async def _watch(self) -> None:
        """Watch deadlines until the run has ended."""
        while self.stop_reason is None:
            now = time.monotonic()
            events = self._ledger.expire(now)
            for instance in self._roster.silent(now):
                self._roster.leave(instance)
                self._warnings.append(f"{instance} was not heard of any more")
                log.warning("gone", instance=instance)
                events += self._ledger.release(instance, "not heard of any more")
            self._check_progress(now)
            await self._apply(events)
            await self._until(lambda: self.stop_reason is not None, int(self.config.broker.heartbeat_s * 500))
        self._runlog.status(self.status())
        await self._publish("shutdown")

    def _check_progress(self, now: float) -> None:
        patience_s = self.config.broker.progress_s
        if now - self._progress_at > patience_s:
            roles = ("rollout", "reward", "learner", "broadcaster")
            missing = [service for service in roles if not self._roster.of(service)]
            waits = f"no {' and no '.join(missing)} is there" if missing else f"bottleneck: {self._roster.bottleneck()}"
            self._stop("failed", f"no group and no step was finished in {patience_s:.0f} s; {waits}")

    async def _publish(self, kind: Any) -> None:
        await self._events.publish(Event(kind=kind, lineage=self._ledger.lineage, version=self._ledger.version))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, condition: Callable[[], bool], wait_ms: int) -> None:
        """Wait until a condition on the state holds, or the time is over."""
        try:
            async with asyncio.timeout(wait_ms / 1000), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            pass

    # Status

    def status(self) -> dict[str, Any]:
        """A snapshot of the run, of plain values; the keys are described in protocol/SPEC.md."""
        version = self._ledger.version
        rates = self._rates()
        return {
            "run_id": f"{self.config.name}-{self._epoch}",
            "name": self.config.name,
            "run_folder": str(self.run_folder),
            "state": self.state,
            "stop_reason": self.stop_reason,
            "started": self._started,
            "version": version,
            "steps": self.total_steps,
            "lineage": self._ledger.lineage,
            "groups": self._ledger.accounts(),
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
            **rates,
        }

    def _rates(self) -> dict[str, float | None]:
        """Samples trained and tokens generated a second over the last versions, and the time left."""
        if len(self._commits) < 2:
            return {"sequences_per_s": None, "tokens_per_s": None, "eta_s": None}
        first, last = self._commits[0], self._commits[-1]
        elapsed = max(last[0] - first[0], 1e-9)
        samples = sum(n for _, n, _ in list(self._commits)[1:])
        per_step = elapsed / (len(self._commits) - 1)
        return {
            "sequences_per_s": samples / elapsed,
            "tokens_per_s": (last[2] - first[2]) / elapsed,
            "eta_s": per_step * (self.total_steps - self._ledger.version),
        }


def _stage_of(body: Complete | Fail) -> str:
    """The stage of a lease, also of one that is over: its work may still be the first to arrive."""
    match body.lease_id.split("/"):
        case [group_id, stage, _] if group_id == body.group_id:
            return stage
    raise ProtocolError("unknown_lease", f"{body.lease_id[:64]!r} is no lease of the group {body.group_id[:64]!r}")


async def serve(config: RunConfig, run_folder: Path, *, on_bound: Callable[[str], None] = lambda address: None) -> None:
    """Run the broker of a run until the run has ended. `on_bound` is told the address once it listens.

    Raises ConfigError or DataError where the run cannot begin, RunStopped where it failed.
    """
    broker = Broker(config, run_folder)
    on_bound(broker.address)
    await broker.run()

"""The broker's server: carries requests to the run, keeps its members and their deadlines."""

from __future__ import annotations

import asyncio
import os
import time
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
    DeadLetters,
    DeadLettersRequest,
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
    Requeue,
    Requeued,
    Resume,
    Resumed,
    Status,
    StatusRequest,
    Welcome,
)
from services.broker.ledger import Grant
from services.broker.page import fill
from services.broker.roster import Roster
from services.broker.run import Run
from services.changes import Changes
from services.process import shown
from shared.addresses import advertised, host_of
from shared.config import RunConfig
from shared.errors import ProtocolError, RunStopped, StrettoError
from shared.log import log

GOODBYE_S = 10.0
"""How long the broker stays after the end of a run, for services and viewers to see it."""
MAX_WAIT_MS = 600_000
MAX_CONTACTS = 1024
LASTING = (Hello, Complete, Fail, Commit, Checkpointed, Resume, Requeue)
"""Requests that are answered once what they changed is in the journal. A lease waits for its own groups alone."""


class Broker:
    """One run and its members."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Reads the data and the journal, and binds the address. Raises ConfigError or DataError where that fails."""
        self.run_state = Run(config, folder, self._publish)
        self.config = config
        self._roster = Roster(config.broker.heartbeat_s)
        self._clock = Clock(largest_step_s=config.broker.heartbeat_s)
        self._epoch = os.urandom(8).hex()
        self._changes = Changes()
        contacts = self.run_state.contacts
        self._server = Server.again(contacts.get("broker"), config.broker.bind, self.handle)
        contacts["broker"] = self._server.address
        self._events = EventPublisher(f"tcp://{host_of(config.broker.bind)}:0")
        self._progress_at = self._clock.now()

    @property
    def address(self) -> str:
        """The address that services are given."""
        return self.config.broker.advertise or advertised(self._server.address)

    async def run(self) -> None:
        """Serve until the run has ended. Raises RunStopped where it failed."""
        run = self.run_state
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._server.run(), name="requests")
            await self._watch()
            await self._say_goodbye()
            serving.cancel()
        run.log.status(self.status())
        self._events.close()
        run.close()
        if run.state == "failed":
            raise RunStopped(str(run.stop_reason))

    async def _say_goodbye(self) -> None:
        """Wait until all services have seen that the run is over, or are taken for gone."""
        if not await self._changes.until(lambda: len(self._roster) == 0, GOODBYE_S):
            log.warning("services did not leave in time", left=[m["instance"] for m in self._roster.status(0.0)])

    # Requests

    async def handle(self, message: Message) -> Reply:
        """The answer to a request. There is none any more once the journal cannot be written."""
        reply = await self._carry_out(message)
        if isinstance(message.body, LASTING):
            await self._flush()
        return reply

    async def _flush(self, upto: int | None = None) -> None:
        try:
            await self.run_state.journal.flush(upto)
        except StrettoError as error:
            self.run_state.stop("failed", str(error))
            self._changes.notify()
            await asyncio.Event().wait()

    async def _carry_out(self, message: Message) -> Reply:
        run = self.run_state
        if message.columns and not isinstance(message.body, Complete):
            raise ProtocolError("bad_column", f"{message.body.type} carries no columns")
        match message.body:
            case Heartbeat() as beat:
                return self._beat(beat)
            case LeaseRequest() as request:
                return await self._lease(request)
            case Complete() as done:
                run.complete(done.group_id, done.lease_id, message.columns)
                self._progress_at = self._clock.now()
            case Fail() as failure:
                run.take(run.ledger.fail(failure.group_id, failure.lease_id, failure.error, retry=failure.retry))
            case Commit() as commit:
                run.commit(commit)
                self._progress_at = self._clock.now()
            case Hello() as hello:
                return self._hello(hello)
            case Locate() as locate:
                return await self._locate(locate)
            case StatusRequest() as request:
                return await self._status(request)
            case Checkpointed() as saved:
                run.checkpointed(saved)
            case Resume() as resume:
                return Resumed(lineage=await run.resume(resume.version))
            case Drain() as drain:
                run.drain("stopped", drain.reason)
            case DeadLettersRequest():
                return DeadLetters(letters=run.dead_letters())
            case Requeue() as requeue:
                return Requeued(count=run.requeue(requeue.group_ids))
            case Leave() as leave:
                self._leave(leave)
            case _:
                raise ProtocolError("unknown_type", f"the broker does not answer {message.body.type}")
        return self._done()

    def _done(self) -> Ok:
        self.run_state.end_if_done(learner_is_there=bool(self._roster.of("learner")))
        self._changes.notify()
        return Ok()

    def _hello(self, hello: Hello) -> Welcome:
        run = self.run_state
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolError("bad_version", f"{hello.instance} speaks {hello.protocol}, not {PROTOCOL_VERSION}")
        if hello.instance in self._roster:  # restarted faster than it was missed
            run.take(run.ledger.release(hello.instance, "started again"))
        self._roster.join(hello, self._clock.now())
        listened = run.contacts.get(hello.instance)
        if hello.address is not None and len(run.contacts) < MAX_CONTACTS:
            run.contacts[hello.instance] = hello.address
            run.journal.note()
        log.info("hello", instance=hello.instance, host=hello.host, pid=hello.pid)
        self._done()
        return Welcome(
            run_id=run.run_id,
            run_folder=str(run.folder),
            config=self.config.model_dump(mode="json"),
            lineage=run.ledger.lineage,
            version=run.ledger.version,
            total_steps=run.total_steps,
            heartbeat_s=self.config.broker.heartbeat_s,
            broker_epoch=self._epoch,
            events_address=advertised(self._events.address),
            listened=listened,
        )

    def _beat(self, beat: Heartbeat) -> Pulse:
        now, run = self._clock.now(), self.run_state
        if beat.instance not in self._roster:
            raise ProtocolError("not_member", f"{beat.instance[:64]!r} is not a member: say hello")
        try:
            self._roster.beat(beat.instance, beat.state, beat.version, beat.stats, now)
            for start, end, bucket in beat.stats.get("spans", []):
                span = {"instance": beat.instance, "start": float(start), "end": float(end), "bucket": str(bucket)}
                run.log.write("spans", span)
        except (TypeError, ValueError, AttributeError) as error:
            raise ProtocolError("bad_header", f"stats of {beat.instance}: {error}") from None
        run.ledger.extend(beat.instance, now)
        self._changes.notify()
        return Pulse(
            lineage=run.ledger.lineage,
            version=run.ledger.version,
            broker_epoch=self._epoch,
            draining=run.state == "draining",
            stop_reason=run.stop_reason,
            gone=self._roster.gone() if self._roster.service(beat.instance) == "broadcaster" else [],
        )

    async def _locate(self, locate: Locate) -> Located:
        await self._until(lambda: self._roster.address(locate.service) is not None, locate.wait_ms)
        return Located(address=self._roster.address(locate.service))

    async def _lease(self, request: LeaseRequest) -> Reply:
        run = self.run_state
        stage = run.stages.get(request.stage)
        if stage is None:
            raise ProtocolError("bad_header", f"there is no stage {request.stage!r}; there are {', '.join(run.stages)}")
        grants: list[Grant] = []
        session = self._roster.session(request.instance)

        def answered() -> bool:
            # Who said hello again meanwhile asks anew: what this request were given might go to a process that died.
            if self._roster.session(request.instance) is not session:
                return True
            if run.state != "running" and not stage.provides:
                raise ProtocolError("draining", "the run ends: save and leave")
            if session is not None and run.stop_reason is None:
                version, rollouts = self._roster.version(request.instance), len(self._roster.of("rollout"))
                grants.extend(run.lease(request, version=version, rollouts=rollouts, now=self._clock.now()))
            return bool(grants)

        await self._until(answered, request.wait_ms)
        await self._flush(max((grant.entry.written for grant in grants), default=0))
        leases = [
            Lease(
                lease_id=grant.lease_id,
                group_id=grant.entry.group.group_id,
                attempt=grant.attempt,
                lease_s=self.config.broker.lease_s,
                lane=grant.entry.group.lane,
                min_version=grant.entry.group.min_version,
                prompt=grant.entry.group.prompt.to_wire() if stage.provides else None,
            )
            for grant in grants
        ]
        columns = [{name: grant.entry.group.columns[name] for name in stage.needs} for grant in grants]
        return Leased(leases=leases), join_groups(columns)

    async def _status(self, request: StatusRequest) -> Status:
        run = self.run_state
        if request.wait_version is not None:
            version = request.wait_version
            await self._until(lambda: run.ledger.version >= version or run.stop_reason is not None, request.wait_ms)
        return Status(status=self.status())

    def _leave(self, leave: Leave) -> None:
        run = self.run_state
        self._roster.leave(leave.instance)
        log.info("left", instance=leave.instance, error=leave.error)
        if leave.error is not None:
            run.warnings.append(f"{leave.instance} left: {leave.error}")
        run.take(run.ledger.release(leave.instance, leave.error or "left", in_order=leave.error is None))

    # Deadlines and events

    async def _watch(self) -> None:
        """Watch deadlines until the run has ended."""
        run = self.run_state
        while run.stop_reason is None:
            now = self._clock.now()
            run.take(run.ledger.expire(now))
            for instance in self._roster.silent(now):
                self._roster.leave(instance)
                run.warnings.append(f"{instance} was not heard of any more")
                log.warning("gone", instance=instance)
                run.take(run.ledger.release(instance, "not heard of any more"))
            self._check_progress(now)
            if failure := run.log.failure:
                run.stop("failed", failure)
            self._done()
            await self._until(lambda: run.stop_reason is not None, int(self.config.broker.heartbeat_s * 500))
        run.log.status(self.status())
        self._publish("shutdown")

    def _check_progress(self, now: float) -> None:
        patience_s = self.config.broker.progress_s
        if now - self._progress_at > patience_s:
            roles = (*self.run_state.stages, "broadcaster")
            missing = [service for service in roles if not self._roster.of(service)]
            waits = f"no {' and no '.join(missing)} is there" if missing else f"bottleneck: {self._roster.bottleneck()}"
            self.run_state.stop("failed", f"no group and no step was finished in {patience_s:.0f} s; {waits}")

    def _publish(self, kind: Any) -> None:
        ledger = self.run_state.ledger
        self._events.publish(Event(kind=kind, lineage=ledger.lineage, version=ledger.version))

    async def _until(self, condition: Callable[[], bool], wait_ms: int) -> None:
        """Wait until a condition on the state holds, or the time is over."""
        await self._changes.until(condition, min(wait_ms, MAX_WAIT_MS) / 1000)

    def status(self) -> dict[str, Any]:
        """A snapshot of the run and its members, of plain values; the keys are described in protocol/SPEC.md."""
        now = self._clock.now()
        return self.run_state.status() | {
            "services": self._roster.status(now),
            "departed": self._roster.departed(now),
            "bottleneck": self._roster.bottleneck(),
            "refused_messages": dict(self._server.refused),
        }

    def ailment(self) -> str | None:
        """Why the run does not go on; None while it does."""
        run = self.run_state
        return None if run.state == "running" else f"{run.state}: {run.stop_reason or 'the learner saves'}"


class Clock:
    """Seconds that this process was awake: while it is stopped itself, nobody's deadline passes.

    It is asked at least twice in `largest_step_s`; what is more than that between two times was a stop.
    """

    def __init__(self, largest_step_s: float) -> None:
        self._largest_step_s = largest_step_s
        self._awake_s = 0.0
        self._asked_at = time.monotonic()

    def now(self) -> float:
        """The seconds so far."""
        before, self._asked_at = self._asked_at, time.monotonic()
        self._awake_s += min(self._asked_at - before, self._largest_step_s)
        return self._awake_s


async def serve(config: RunConfig, run_folder: Path, *, on_bound: Callable[[str, str], None]) -> None:
    """Run the broker of a run until the run has ended. `on_bound` is told address and run id once it listens.

    Raises ConfigError or DataError where the run cannot begin, RunStopped where it failed.
    """
    broker = Broker(config, run_folder)
    stages = tuple(broker.run_state.stages)
    exposition = shown("broker", "broker", lambda page: fill(page, broker.status(), stages), broker.ailment)
    if exposition is not None:
        await exposition.start()
    on_bound(broker.address, broker.run_state.run_id)
    try:
        await broker.run()
    finally:
        if exposition is not None:
            await exposition.close()

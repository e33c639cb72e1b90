"""A service's membership of a run: hello, heartbeats, events, and requests to the broker."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from protocol.channel import Client
from protocol.events import EventSubscriber
from protocol.messages import (
    Body,
    Heartbeat,
    Hello,
    Leave,
    Locate,
    Located,
    Ok,
    Pulse,
    Service,
    Welcome,
)
from services.process import shown
from shared.account import TimeAccount
from shared.config import RunConfig, parse_config
from shared.errors import ProtocolError, RunStopped, Unreachable
from shared.group import Columns
from shared.log import log
from shared.memory import memory_figures

if TYPE_CHECKING:
    from services.page import Page

State = Literal["STARTING", "STALE", "SERVING", "DRAINING", "DEAD"]
Answer = TypeVar("Answer", bound=Body)

JOIN_DEADLINE_S = float(os.environ.get("STRETTO_JOIN_S", "60"))
CLEANUP_S = 5.0
SILENT_HEARTBEATS = 4
"""How many go without an answer before /health says so; the broker has taken the service for gone by then."""


class Member:
    """One service in a run.

    config, run_folder, run_id, total_steps: from the broker's welcome. listened: where an instance of this name has
    listened in this run. lineage, version: the newest that the broker told of. gone: whom it has given up.
    state, holds_version, figures: what the next heartbeat tells the broker. account: where this service's time goes.
    """

    config: RunConfig
    run_folder: str
    run_id: str
    total_steps: int
    listened: str | None

    def __init__(self, broker: str, service: Service, instance: str, *, stage: str | None = None) -> None:
        self.service: Service = service
        self.instance = instance
        self.stage = stage
        self.state: State = "STARTING"
        self.holds_version = -1
        self.figures: dict[str, float] = {}
        self.account = TimeAccount()
        self.lineage = 0
        self.version = 0
        self.draining = False
        self.gone: list[str] = []
        self._client = Client(broker)
        self._address: str | None = None
        self._beat_now = asyncio.Event()
        self._events = EventSubscriber()
        self._heard_at: float | None = None
        self._exposition = shown(service, instance, self._fill, self._ailment)

    async def join(self, address: str | None = None) -> RunConfig:
        """Say hello and take the run's config from the answer. `address` is where this service listens, if it does.

        Raises Unreachable where there is no broker.
        """
        self._address = address
        if self._exposition is not None:
            await self._exposition.start()
        hello = Hello(
            service=self.service,
            stage=self.stage,
            instance=self.instance,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=address,
        )
        welcome, _ = await self._client.request(hello, Welcome, deadline_s=JOIN_DEADLINE_S)
        self.config = parse_config(welcome.config)
        self.run_folder, self.run_id, self.total_steps = welcome.run_folder, welcome.run_id, welcome.total_steps
        self.lineage, self.version, self.listened = welcome.lineage, welcome.version, welcome.listened
        self._events.connect(welcome.events_address)
        self._heartbeat_s, self._heard_at = welcome.heartbeat_s, time.monotonic()
        log.info("joined", run=self.run_id, version=self.version)
        return self.config

    async def request(
        self, body: Body, answer: type[Answer], columns: Columns | None = None, *, wait_s: float = 0.0
    ) -> tuple[Answer, Columns]:
        """Ask the broker, with the run's patience as deadline."""
        return await self._client.request(
            body, answer, columns, wait_s=wait_s, deadline_s=self.config.broker.patience_s
        )

    async def locate(self, service: Service) -> str:
        """The address where a service of the run listens. Raises Unreachable when it does not join in time."""
        patience_s = self.config.broker.patience_s
        located, _ = await self.request(
            Locate(service=service, wait_ms=int(patience_s * 1000)), Located, wait_s=patience_s
        )
        if located.address is None:
            raise Unreachable(f"no {service} joined the run within {patience_s:.0f} s: is it started?")
        return located.address

    async def beat(self) -> None:
        """Send heartbeats until cancelled.

        Raises RunStopped when the run has ended, Unreachable when the broker is away for longer than its patience.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(), name="events")
            while True:
                self._beat_now.clear()
                await self._beat_once()
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await self._beat_now.wait()
                except TimeoutError:
                    pass

    def beat_soon(self) -> None:
        """Have the next heartbeat sent at once, because it has news."""
        self._beat_now.set()

    async def _beat_once(self) -> None:
        stats: dict[str, Any] = {
            "time": self.account.seconds(),
            "spans": [list(span) for span in self.account.take_spans()],
            "figures": self.figures | memory_figures(),
        }
        try:
            pulse, _ = await self.request(
                Heartbeat(instance=self.instance, state=self.state, version=self.holds_version, stats=stats), Pulse
            )
        except ProtocolError as error:
            if error.code != "not_member":
                raise
            log.warning("the broker does not know this service any more; it joins again")
            await self.join(self._address)
            return
        self._heard_at = time.monotonic()
        self.lineage, self.version, self.draining = pulse.lineage, pulse.version, pulse.draining
        self.gone = pulse.gone
        if pulse.stop_reason is not None:
            raise RunStopped(pulse.stop_reason)

    async def _listen(self) -> None:
        async for event in self._events.events():
            if event.kind in ("drain", "shutdown"):
                self._beat_now.set()
            elif event.kind == "version" and event.lineage == self.lineage:
                self.version = max(self.version, event.version)

    async def run(self, *work: Callable[[], Awaitable[None]]) -> None:
        """Do the service's work beside its heartbeats; return when the run has ended.

        What the work raises is told to the broker and raised again. The broker is always told that the instance left.
        """
        error: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.beat(), name="heartbeats")
                for part in work:
                    tasks.create_task(_await(part()), name=getattr(part, "__name__", "work"))
        except BaseExceptionGroup as group:
            error = first_error(group)
            if not isinstance(error, RunStopped):
                raise error from None
            log.info("run ended", reason=str(error))
        finally:
            await self._leave(None if error is None or isinstance(error, RunStopped) else str(error))

    async def _leave(self, error: str | None) -> None:
        try:
            await self._client.request(Leave(instance=self.instance, error=error), Ok, deadline_s=CLEANUP_S)
        except (Unreachable, ProtocolError) as trouble:
            log.warning("could not tell the broker that this service leaves", error=str(trouble))
        await self._client.close()
        self._events.close()
        if self._exposition is not None:
            await self._exposition.close()

    # What it shows over HTTP

    def _fill(self, page: Page) -> None:
        page.add_state(self.state, get_args(State))
        page.add("policy_version", "updates that were committed, as far as the service knows", self.version)
        if self.holds_version >= 0:
            page.add("held_version", "policy version of the weights that the service computes with", self.holds_version)
        for bucket, seconds in self.account.seconds().items():
            page.add("time_seconds_total", "where the time of the service went", seconds, bucket=bucket)
        page.add_figures({name: value for name, value in self.figures.items() if "/" in name})
        page.add_figures({n: v for n, v in self.figures.items() if "/" not in n}, prefix=f"{self.service}_")

    def _ailment(self) -> str | None:
        """Why the service is of no use now; None while it is."""
        if self._heard_at is None:
            return "starting: it has not joined the run"
        if self.draining:
            return "draining"
        if self.state != "SERVING":
            return self.state.lower()
        silence_s = time.monotonic() - self._heard_at
        if silence_s > self._heartbeat_s * SILENT_HEARTBEATS:
            return f"the broker has not answered for {silence_s:.0f} s"
        return None


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that a task group ended with: the first that is not a group itself."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        stopped = [e for e in error.exceptions if not isinstance(e, RunStopped)]
        error = (stopped or list(error.exceptions))[0]
    return error


async def _await(work: Awaitable[None]) -> None:
    await work

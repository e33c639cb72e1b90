"""The stage actor: lease groups → process → complete. Every stage but the learner runs on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protocol.codec import part_groups
from protocol.messages import Complete, Fail, Lease, Leased, LeaseRequest, Ok
from services.member import Member
from shared.account import Bucket
from shared.errors import EngineFailed, ProtocolError, StrettoError
from shared.group import Columns, Lane, Prompt, TrajectoryGroup
from shared.log import log

LONG_POLL_S = 20.0

Process = Callable[[TrajectoryGroup], Awaitable[Columns]]


class StageActor:
    """Leases groups of one stage and processes them, as many at once as there is room for.

    process: makes the columns that the stage provides. A StrettoError or any other error it raises fails the group,
    which the broker gives to somebody else; an EngineFailed ends the actor.
    capacity: most groups at once; or most samples, where `samples` tells how many a group of each lane makes.
    idle_bucket: where the time goes while nothing is leased.
    """

    def __init__(
        self,
        member: Member,
        process: Process,
        *,
        capacity: int,
        idle_bucket: Bucket,
        samples: dict[Lane, int] | None = None,
    ) -> None:
        assert member.stage is not None
        self._member = member
        self._stage = member.stage
        self._process = process
        self._counts_samples = samples is not None
        self._size: dict[Lane, int] = samples or {"train": 1, "eval": 1}
        self._idle_bucket: Bucket = idle_bucket
        self._capacity = self._room = capacity
        self._leases: dict[str, Lease] = {}
        self._freed = asyncio.Condition()

    async def run(self) -> None:
        """Work until cancelled."""
        self._member.account.enter(self._idle_bucket)
        async with asyncio.TaskGroup() as tasks:
            while True:
                async with self._freed:
                    await self._freed.wait_for(lambda: self._room >= self._size["train"])
                for lease, columns in await self._lease():
                    is_under_way = lease.group_id in self._leases  # the broker had given up on the lease before
                    self._leases[lease.group_id] = lease
                    if not is_under_way:
                        self._room -= self._size[lease.lane]
                        self._member.account.enter("compute")
                        tasks.create_task(self._work(lease, columns), name=f"group {lease.group_id}")

    async def _lease(self) -> list[tuple[Lease, Columns]]:
        """Groups that are ready for the stage, as many as there is room for; empty when none came in a while."""
        request = LeaseRequest(
            instance=self._member.instance,
            stage=self._stage,
            max_groups=self._room,
            max_samples=self._room if self._counts_samples else None,
            wait_ms=int(LONG_POLL_S * 1000),
        )
        leased, columns = await self._member.request(request, Leased, wait_s=LONG_POLL_S)
        return list(zip(leased.leases, part_groups(columns, len(leased.leases)), strict=True))

    async def _work(self, lease: Lease, columns: Columns) -> None:
        """Process one group and tell the broker the outcome, for its latest lease; then its room is free again."""
        assert lease.prompt is not None
        prompt = Prompt.from_wire(lease.prompt)
        group = TrajectoryGroup(lease.group_id, lease.lane, prompt, lease.min_version, columns)
        fault: str | None = None
        try:
            provided = await self._process(group)
        except EngineFailed:
            raise  # the group is not to blame: it goes back when this service leaves
        except Exception as error:
            if not isinstance(error, StrettoError):
                log.exception("a group failed", group=lease.group_id)
            fault, provided = _text(error), {}
        lease = self._leases.pop(lease.group_id)
        body: Complete | Fail
        if fault is None:
            body = Complete(lease_id=lease.lease_id, group_id=lease.group_id, attempt=lease.attempt)
        else:
            body = Fail(lease_id=lease.lease_id, group_id=lease.group_id, error=fault)
        await self._tell(body, provided)
        async with self._freed:
            self._room += self._size[lease.lane]
            if self._room == self._capacity:
                self._member.account.enter(self._idle_bucket)
            self._freed.notify()

    async def _tell(self, body: Complete | Fail, columns: Columns) -> None:
        try:
            await self._member.request(body, Ok, columns)
        except ProtocolError as error:
            if error.code != "unknown_lease":
                raise
            log.info("another attempt was faster", group=body.group_id)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"

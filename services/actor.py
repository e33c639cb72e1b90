"""The stage actor: lease groups → process → complete. Rollout, reward and every other stage but the learner run on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protocol.codec import part_groups
from protocol.messages import Complete, Fail, Lease, Leased, LeaseRequest, Ok
from services.member import Member
from shared.account import Bucket
from shared.errors import ProtocolError, StrettoError
from shared.group import Columns, Prompt, TrajectoryGroup
from shared.log import log

LONG_POLL_S = 20.0

Process = Callable[[TrajectoryGroup], Awaitable[Columns]]


class StageActor:
    """Leases groups of one stage and processes up to `capacity` of them at once.

    process: makes the columns that the stage provides. A StrettoError or any other error it raises fails the group,
    which the broker gives to somebody else.
    version: the policy version this service holds, told with each lease.
    idle_bucket: where the time goes while nothing is leased.
    """

    def __init__(
        self,
        member: Member,
        process: Process,
        *,
        capacity: int,
        idle_bucket: Bucket,
        version: Callable[[], int] = lambda: 0,
    ) -> None:
        assert member.stage is not None
        self._member = member
        self._stage = member.stage
        self._process = process
        self._capacity = capacity
        self._version = version
        self._idle_bucket: Bucket = idle_bucket
        self._room = asyncio.Semaphore(capacity)
        self._running = 0
        self.completed = 0

    async def run(self) -> None:
        """Work until cancelled."""
        self._member.account.enter(self._idle_bucket)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._room.acquire()
                self._room.release()
                for lease, columns in await self.lease():
                    await self._room.acquire()
                    self._started()
                    tasks.create_task(self._work(lease, columns), name=f"group {lease.group_id}")

    async def lease(self) -> list[tuple[Lease, Columns]]:
        """Groups that are ready for the stage, as many as there is room for; empty when none came in a while."""
        request = LeaseRequest(
            instance=self._member.instance,
            stage=self._stage,
            max_groups=self._capacity - self._running,
            version=self._version(),
            wait_ms=int(LONG_POLL_S * 1000),
        )
        leased, columns = await self._member.request(request, Leased, wait_s=LONG_POLL_S)
        return list(zip(leased.leases, part_groups(columns, len(leased.leases)), strict=True))

    async def _work(self, lease: Lease, columns: Columns) -> None:
        try:
            group = TrajectoryGroup(
                lease.group_id, lease.lane, Prompt.from_wire(lease.prompt), lease.min_version, columns
            )
            provided = await self._process(group)
        except Exception as error:
            if not isinstance(error, StrettoError):
                log.exception("a group failed", group=lease.group_id)
            await self._tell(Fail(lease_id=lease.lease_id, group_id=lease.group_id, error=_text(error)), {})
        else:
            done = Complete(lease_id=lease.lease_id, group_id=lease.group_id, attempt=lease.attempt)
            await self._tell(done, provided)
            self.completed += 1
        finally:
            self._finished()

    async def _tell(self, body: Complete | Fail, columns: Columns) -> None:
        try:
            await self._member.request(body, Ok, columns)
        except ProtocolError as error:
            if error.code != "unknown_lease":
                raise
            log.info("another attempt was faster", group=body.group_id)

    def _started(self) -> None:
        self._running += 1
        self._member.account.enter("compute")

    def _finished(self) -> None:
        self._running -= 1
        self._room.release()
        if self._running == 0:
            self._member.account.enter(self._idle_bucket)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"

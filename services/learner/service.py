"""The learner service: leases a batch, trains on it, publishes the new weights, commits; checkpoints on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from protocol.codec import part_groups
from protocol.messages import Checkpointed, Commit, Leased, LeaseRequest, Ok, Resume, Resumed
from services.compute.checkpoint import Captured, Checkpoints, capture
from services.learner.crew import Crew
from services.learner.critics import Critics
from services.learner.publisher import Publisher
from services.learner.rank import NO_PROMPT, follow
from services.learner.trainer import load_trainer
from services.member import Member
from shared.algorithms import load_algorithm
from shared.errors import DriftError, ProtocolError
from shared.group import TrajectoryGroup
from shared.log import log

LONG_POLL_S = 5.0
P = ParamSpec("P")
T = TypeVar("T")


class LearnerService:
    """The learner in a run, which goes on from the run's latest checkpoint if there is one.

    Everything that computes runs in one thread of its own, the trainer thread; checkpoints are written in another.
    """

    def __init__(self, member: Member, crew: Crew) -> None:
        self._member = member
        self._crew = crew
        self._config = member.config
        self._checkpoints = Checkpoints(Path(member.run_folder) / "checkpoints", self._config.checkpoint)
        self._saved_version = 0
        self._waited_s = 0.0
        self._writing: asyncio.Task[None] | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._critics = Critics(self._config.broker.progress_s)

    async def run(self) -> None:
        """Train until the last version, or until the run drains; then save, and stay until the run has ended."""
        await self._start()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                while self._trainer.version < self._member.total_steps:
                    asked = time.perf_counter()
                    groups = await self._lease()
                    self._waited_s += time.perf_counter() - asked
                    if groups is None:
                        break
                    if self._publisher.is_forgotten:
                        await self._publish()
                    if groups:
                        await self._update(groups)
                await self._save()
                await self._written()
                self._member.state = "DRAINING"
                self._member.account.enter("overhead")
                await asyncio.Event().wait()  # ended by the run's end; the snapshots serve the last evaluation
        finally:
            await self._publisher.close()
            await self._critics.close()

    async def _start(self) -> None:
        """Load the model or the latest checkpoint, and publish the weights that the rollouts start with."""
        latest = self._checkpoints.latest()
        self._trainer = await self._compute(load_trainer, self._config, self._member.total_steps, latest, self._crew)
        if latest is not None or self._member.version > 0:
            self._saved_version = self._trainer.version
            resume = Resume(version=self._saved_version, location="" if latest is None else str(latest))
            resumed, _ = await self._member.request(resume, Resumed)
            self._member.lineage = resumed.lineage
        await self._critics.connect(self._member, load_algorithm(self._config.algorithm).critics)
        await self._critics.go_back(self._trainer.version)
        broadcaster = await self._member.locate("broadcaster")
        self._publisher = Publisher(broadcaster, self._member.run_id, self._trainer.backend, self._config)
        await self._publish()
        self._member.state = "SERVING"

    async def _lease(self) -> list[TrajectoryGroup] | None:
        """The groups of the next update; empty when they were not there in a while, None when the run drains."""
        member, n_groups = self._member, self._config.prompts_per_step
        member.account.enter("groups")
        request = LeaseRequest(
            instance=member.instance,
            stage="learner",
            max_groups=n_groups,
            min_groups=n_groups,
            wait_ms=int(LONG_POLL_S * 1000),
        )
        try:
            leased, columns = await member.request(request, Leased, wait_s=LONG_POLL_S)
        except ProtocolError as refusal:
            if refusal.code == "draining":
                return None
            raise
        return [
            TrajectoryGroup(lease.group_id, lease.lane, NO_PROMPT, lease.min_version, part)
            for lease, part in zip(leased.leases, part_groups(columns, len(leased.leases)), strict=True)
        ]

    async def _update(self, groups: list[TrajectoryGroup]) -> None:
        started = time.perf_counter()
        if self._trainer.version == 0:
            found = await self._compute(self._trainer.self_check, groups)
            self._member.figures |= {f"self_check/{name}": value for name, value in found.items()}
            self._member.beat_soon()
            log.info("self-check passed", **found)
        batch = await self._compute(self._trainer.prepare, groups)
        learning = asyncio.create_task(self._critics.learn(batch.version, batch.lessons), name="critics")
        try:
            metrics = await self._compute(self._trainer.update, batch) | await learning
        except DriftError:
            if not batch.lessons:  # critics have gone on, and can save no older version
                await self._save()
                await self._written()
            raise
        finally:
            learning.cancel()
        await self._publish()
        metrics |= self._publisher.figures | {"time/update_s": time.perf_counter() - started}
        metrics["perf/lease_wait_s"], self._waited_s = self._waited_s, 0.0
        commit = Commit(
            lineage=self._member.lineage,
            version=self._trainer.version,
            group_ids=[group.group_id for group in groups],
            metrics=metrics,
        )
        await self._member.request(commit, Ok)
        if self._trainer.version % self._config.checkpoint.every == 0:
            await self._save()

    async def _publish(self) -> None:
        """Write the weights into a free slot, compute with them from now on, and offer them to the rollouts."""
        version, published = self._trainer.version, False
        while not published:
            with self._member.account.within("weights"):
                tensors = await self._publisher.acquire(self._member.lineage, version)
            with self._member.account.within("compute"):
                await self._in_thread(self._publisher.write, tensors)
            published = await self._publisher.publish(self._member.lineage, version)

    async def _save(self) -> None:
        """Copy what a checkpoint holds, once the one before it is written; it is written while the training goes on."""
        if self._saved_version == self._trainer.version:
            return
        await self._written()
        started = time.perf_counter()
        with self._member.account.within("overhead"):
            captured = await self._in_thread(capture, self._trainer, self._member.lineage)
        self._saved_version = captured.version
        self._member.figures["checkpoint/copy_s"] = time.perf_counter() - started
        self._writing = self._tasks.create_task(self._write(captured), name="checkpoint")

    async def _write(self, captured: Captured) -> None:
        """Have critics save the same version, write it, and tell the broker that the run may go on from there.

        A critic is asked before anything else is asked of it, so that it is still at that version.
        """
        started, lineage = time.perf_counter(), self._member.lineage
        await self._critics.store(captured.version, lineage)
        loop = asyncio.get_running_loop()
        location = await loop.run_in_executor(self._writer, self._checkpoints.write, captured)
        log.info("saved a checkpoint", version=captured.version, location=str(location))
        self._member.figures["checkpoint/write_s"] = time.perf_counter() - started
        saved = Checkpointed(
            lineage=lineage, version=captured.version, location=str(location), oldest=self._checkpoints.oldest()
        )
        await self._member.request(saved, Ok)

    async def _written(self) -> None:
        """Wait until the newest checkpoint is there."""
        if self._writing is not None:
            with self._member.account.within("overhead"):
                await self._writing

    async def _compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._member.account.within("compute"):
            return await self._in_thread(function, *args, **kwargs)

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))


async def serve(broker: str, instance: str) -> None:
    """Run the learner until the run ends: as rank 0 of those that torchrun started, or as one of the others."""
    crew = await asyncio.to_thread(Crew.join)
    if crew.rank > 0:
        await asyncio.to_thread(follow, crew)
        crew.leave()
        return
    member = Member(broker, "learner", instance, stage="learner")
    await member.join()
    try:
        await member.run(LearnerService(member, crew).run)
    finally:
        crew.leave()

"""The critic service: values of the states of samples, and an update beside each of the learner's.

It does what the learner says: learn from the groups of a version, save beside its checkpoint, go back to one. So its
state belongs to a version of the policy, and after a fault of either both go on from the same checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import torch

from protocol.channel import Reply, Server
from protocol.codec import Message, part_groups
from protocol.messages import GoBack, Learn, Learned, Ok, Service, Store
from services.actor import StageActor
from services.compute.checkpoint import Captured, Checkpoints, capture, restore
from services.compute.hf import HFCritic
from services.compute.inference import TokenStage
from services.compute.memory import Room
from services.critic.trainer import CriticTrainer
from services.member import Member
from shared.addresses import advertised, host_of
from shared.errors import ProtocolError, StrettoError
from shared.graph import VALUES
from shared.group import Columns
from shared.log import log

GROUPS_AT_ONCE = 32
MAX_GROUPS = 65_536

P = ParamSpec("P")
T = TypeVar("T")


class CriticService:
    """A critic in a run. Everything that computes runs in one thread of its own."""

    def __init__(self, member: Member) -> None:
        config = member.config
        self._member = member
        self._settings = config.critic_settings(member.service)
        keep = config.checkpoint.model_copy(update={"keep_last": config.checkpoint.keep_last + 1})
        # One more than the learner, which may fall between the two that are saved.
        self._checkpoints = Checkpoints(Path(member.run_folder) / "checkpoints" / member.service, keep)
        self._room = Room(member.service, self._settings)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=member.service)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._loaded = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._trainer: CriticTrainer

    async def run(self) -> None:
        """Load the critic, then value groups until cancelled, or until an update fails."""
        self._trainer = await self._in_thread(self._load, self._checkpoints.latest())
        self._loaded.set()
        stage = TokenStage(
            VALUES[self._member.service],
            lambda rows: self._trainer.values(rows),
            self._room,
            self._thread,
        )
        actor = StageActor(self._member, stage.process, capacity=GROUPS_AT_ONCE, idle_bucket="groups")
        self._member.state = "SERVING"
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(actor.run(), name="stage")
            await self._failed

    def _load(self, checkpoint: Path | None) -> CriticTrainer:
        config = self._member.config
        model = str(checkpoint or self._settings.model or config.model)
        torch.manual_seed(config.seed)
        backend = HFCritic.load(model, self._settings, tokenizer=config.tokenizer)
        trainer = CriticTrainer(config, self._settings, backend, self._room, total_steps=self._member.total_steps)
        if checkpoint is not None:
            restore(checkpoint, trainer)
        return trainer

    async def handle(self, message: Message) -> Reply:
        """The answer to a request of the learner."""
        await self._loaded.wait()
        match message.body:
            case Learn() as learn:
                return await self._learn(learn, message)
            case Store() as store:
                await self._store(store)
            case GoBack() as back:
                await self._go_back(back.version)
            case _:
                raise ProtocolError("unknown_type", f"a critic does not answer {message.body.type}")
        return Ok()

    async def _learn(self, learn: Learn, message: Message) -> Learned:
        if learn.groups > MAX_GROUPS:
            raise ProtocolError("bad_header", f"{learn.groups} groups; the limit is {MAX_GROUPS}")
        lessons = part_groups(message.columns, learn.groups)
        for lesson in lessons:
            _check(lesson)
        self._require(learn.version - 1)
        try:
            metrics = await self._in_thread(self._trainer.learn, lessons)
        except Exception as error:  # the weights may be spoilt: this service ends, and another goes on
            if not self._failed.done():
                self._failed.set_exception(error)
            raise ProtocolError("other_version", f"the update failed: {error}") from None
        return Learned(metrics=metrics)

    def _require(self, version: int) -> None:
        if self._trainer.version != version:
            raise ProtocolError(
                "other_version",
                f"the critic is at version {self._trainer.version}, not {version}: it was started again",
            )

    async def _store(self, store: Store) -> None:
        """Save what it is now; while that is written it may learn on."""
        captured = await self._in_thread(self._capture, store)
        await asyncio.get_running_loop().run_in_executor(self._writer, self._checkpoints.write, captured)

    def _capture(self, store: Store) -> Captured:
        self._require(store.version)
        return capture(self._trainer, store.lineage)

    async def _go_back(self, version: int) -> None:
        if self._trainer.version == version:
            return
        log.info("goes back", version=version, before=self._trainer.version)
        try:
            checkpoint = None
            if version > 0:  # in the writer's thread, after what it may still write
                loop = asyncio.get_running_loop()
                checkpoint = await loop.run_in_executor(self._writer, self._checkpoints.at, version)
            self._trainer = await self._in_thread(self._load, checkpoint)
        except StrettoError as error:
            raise ProtocolError("other_version", str(error)) from None

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with self._member.account.within("compute"):
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))


LESSON = {
    "prompt_tokens": np.int32,
    "tokens": np.int32,
    "tokens_offsets": np.int64,
    "loss_mask": np.bool_,
    "values": np.float32,
    "returns": np.float32,
}
"""The columns of a group that a critic learns from."""


def _check(lesson: Columns) -> None:
    """Raises ProtocolError `bad_column` where the columns of a group are not those of a lesson."""
    if {name: array.dtype for name, array in lesson.items()} != LESSON or any(a.ndim != 1 for a in lesson.values()):
        raise ProtocolError("bad_column", f"a lesson has the columns {', '.join(LESSON)} with their dtypes")
    offsets = lesson["tokens_offsets"]
    lengths = {len(lesson[name]) for name in ("tokens", "loss_mask", "values", "returns")}
    rising = len(offsets) > 0 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
    if not rising or lengths != {int(offsets[-1])} or not len(lesson["prompt_tokens"]):
        raise ProtocolError("bad_column", "the columns of a lesson do not have one value a token")


async def serve(broker: str, instance: str, service: Service) -> None:
    """Run a critic until the run ends."""
    member = Member(broker, service, instance, stage=service)
    config = await member.join()
    critic = CriticService(member)
    server = Server.again(member.listened, f"tcp://{host_of(config.broker.bind)}:0", critic.handle)
    await member.join(advertised(server.address))
    await member.run(server.run, critic.run)

"""What a critic answers: only what continues its version, and only lessons that are whole."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from protocol.codec import Message, join_groups
from protocol.messages import Drain, GoBack, Learn, Ok, Store
from services.compute.inference import number_tokens
from services.critic import service as critic_module
from services.critic.service import CriticService
from shared.account import TimeAccount
from shared.errors import ProtocolError

from ..conftest import make_config
from .test_trainer import lesson


class NoStage:
    """In place of the stage actor, which would ask a broker."""

    def __init__(self, *args, **kwargs) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def serving(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(critic_module, "StageActor", NoStage)

    @asynccontextmanager
    async def serve():
        member = SimpleNamespace(
            config=make_config(tiny_model, critic={"dtype": "float32", "lr": 1e-2}),
            service="critic",
            run_folder=str(tmp_path),
            total_steps=10,
            account=TimeAccount(),
            state="STARTING",
        )
        critic = CriticService(member)
        running = asyncio.create_task(critic.run())
        try:
            yield critic
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return serve


def learn(version: int, *lessons: dict) -> Message:
    return Message(Learn(version=version, groups=len(lessons)), join_groups(lessons))


async def refused(critic: CriticService, message: Message) -> str:
    with pytest.raises(ProtocolError) as raised:
        await critic.handle(message)
    return raised.value.code


async def test_a_critic_goes_back_to_what_it_saved_and_learns_the_same_again(serving):
    async with serving() as critic:
        await critic.handle(learn(1, lesson(1), lesson(2)))
        assert isinstance(await critic.handle(Message(Store(version=1, lineage=0), {})), Ok)
        first = await critic.handle(learn(2, lesson(3)))
        await critic.handle(Message(GoBack(version=1), {}))
        again = await critic.handle(learn(2, lesson(3)))
        assert again == first and first.metrics["grad_norm"] > 0
        await critic.handle(Message(GoBack(version=0), {}))
        (values,) = number_tokens(critic._trainer.values, [lesson(1)], critic._room)
        assert critic._trainer.version == 0 and not values.any()


async def test_a_critic_learns_on_while_its_checkpoint_is_written_and_goes_back_to_it_once_it_is(serving):
    async with serving() as critic:
        await critic.handle(learn(1, lesson(1)))
        may_write, write = threading.Event(), critic._checkpoints.write
        critic._checkpoints.write = lambda captured: may_write.wait(100) and write(captured)
        storing = asyncio.create_task(critic.handle(Message(Store(version=1, lineage=0), {})))
        learning = asyncio.create_task(critic.handle(learn(2, lesson(3))))  # asked right behind, as the learner does
        first = await learning
        assert not storing.done()
        going_back = asyncio.create_task(critic.handle(Message(GoBack(version=1), {})))
        may_write.set()
        assert isinstance(await storing, Ok) and isinstance(await going_back, Ok)
        assert critic._trainer.version == 1
        assert await critic.handle(learn(2, lesson(3))) == first


async def test_what_does_not_continue_the_version_is_refused(serving):
    async with serving() as critic:
        assert await refused(critic, learn(2, lesson(1))) == "other_version"
        assert await refused(critic, Message(Store(version=3, lineage=0), {})) == "other_version"
        assert await refused(critic, Message(GoBack(version=7), {})) == "other_version"
        assert await refused(critic, Message(Drain(reason="x"), {})) == "unknown_type"
        assert critic._trainer.version == 0


@pytest.mark.parametrize(
    "change",
    [
        {"returns": np.zeros(1, dtype="f4")},
        {"values": np.zeros(0, dtype="f4")},
        {"prompt_tokens": np.zeros(0, dtype="i4")},
        {"tokens_offsets": np.zeros(0, dtype="i8")},
        {"tokens_offsets": np.array([0, 10**9])},
        {"loss_mask": np.zeros(3, dtype="u1")},
        {"more": np.zeros(3, dtype="f4")},
    ],
)
async def test_a_lesson_that_is_not_whole_is_refused(serving, change):
    async with serving() as critic:
        assert await refused(critic, learn(1, lesson(1) | change)) == "bad_column"
        assert await refused(critic, Message(Learn(version=1, groups=10**9), {})) == "bad_header"


async def test_an_update_that_fails_ends_the_service(serving):
    async with serving() as critic:
        spoilt = lesson(1)
        spoilt["returns"][:] = np.inf
        assert await refused(critic, learn(1, spoilt)) == "other_version"
        assert "is inf" in str(critic._failed.exception()) or "is nan" in str(critic._failed.exception())

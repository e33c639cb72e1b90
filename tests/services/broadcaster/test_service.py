"""The broadcaster's answers: long polls end when there is news, and nobody who left holds anything."""

from __future__ import annotations

import asyncio

import pytest

from protocol.codec import Message
from protocol.messages import AcquireSlot, Follow, Leave, Locate, Ok, Publish
from services.broadcaster.service import Broadcaster
from shared.config import Weights
from shared.errors import ProtocolError

POLL_MS = 30_000


async def ask(broadcaster, body):
    async with asyncio.timeout(10):
        return await broadcaster.handle(Message(body, {}))


def acquire(version, wait_ms=0):
    return AcquireSlot(path="f", is_new=version == 0, lineage=0, version=version, wait_ms=wait_ms)


async def publish(broadcaster, version):
    slot = (await ask(broadcaster, acquire(version))).slot
    assert slot is not None
    body = Publish(path="f", slot=slot, lineage=0, version=version, manifest={})
    assert await ask(broadcaster, body) == Ok()


def follow(instance, slot, version, wait_ms=0):
    return Follow(instance=instance, path="f", slot=slot, lineage=0, version=version, wait_ms=wait_ms)


async def long_poll(broadcaster, body):
    """A request that waits for news by now."""
    task = asyncio.create_task(ask(broadcaster, body))
    async with asyncio.timeout(10):
        while not broadcaster._changes._next._waiters:
            await asyncio.sleep(0)
    return task


async def test_a_waiting_rollout_is_answered_when_a_version_is_published():
    broadcaster = Broadcaster(Weights())
    waiting = await long_poll(broadcaster, follow("a", None, -1, POLL_MS))
    await publish(broadcaster, 0)
    offer = await waiting
    assert (offer.path, offer.slot, offer.version) == ("f", 0, 0)


async def test_a_follower_without_news_is_answered_after_its_wait():
    broadcaster = Broadcaster(Weights())
    await publish(broadcaster, 0)
    offer = await ask(broadcaster, follow("a", 0, 0, wait_ms=1))
    assert offer.slot is None and offer.version == 0


async def test_a_waiting_learner_is_answered_when_a_rollout_goes_on_to_the_newest():
    broadcaster = Broadcaster(Weights())
    for version, reader in enumerate(["a", "b", "c"]):
        await publish(broadcaster, version)
        await ask(broadcaster, follow(reader, None, -1))
    full = await ask(broadcaster, acquire(3))
    assert full.slot is None and full.held_by == ["a", "b"]
    waiting = await long_poll(broadcaster, acquire(3, POLL_MS))
    await ask(broadcaster, follow("a", None, -1))
    assert (await waiting).slot == 0


async def test_a_rollout_that_leaves_while_it_waits_holds_nothing_afterwards():
    broadcaster = Broadcaster(Weights())
    await publish(broadcaster, 0)
    waiting = await long_poll(broadcaster, follow("a", 0, 0, POLL_MS))
    await ask(broadcaster, Leave(instance="a"))
    for version in (1, 2, 3, 4):
        await publish(broadcaster, version)
    assert not waiting.done()
    waiting.cancel()


async def test_a_rollout_that_keeps_the_learner_waiting_is_counted_and_refused():
    broadcaster = Broadcaster(Weights(deadline_s=0.01))
    for version, reader in enumerate(["a", "b", "c"]):
        await publish(broadcaster, version)
        await ask(broadcaster, follow(reader, None, -1))
    got = await ask(broadcaster, acquire(3, POLL_MS))
    assert got.slot == 0 and broadcaster.figures["weights/evictions"] == 2
    with pytest.raises(ProtocolError, match="a kept the learner waiting for slot 0 and lost it: restart"):
        await ask(broadcaster, follow("a", 0, 0))


async def test_the_learner_does_not_wait_for_a_rollout_that_the_broker_has_given_up():
    gone = set()
    broadcaster = Broadcaster(Weights(), gone=lambda: gone)
    for version, reader in enumerate(["dead", "slow", "c"]):
        await publish(broadcaster, version)
        await ask(broadcaster, follow(reader, None, -1))
    assert (await ask(broadcaster, acquire(3))).held_by == ["dead", "slow"]
    gone.add("dead")
    assert (await ask(broadcaster, acquire(3))).slot == 0
    with pytest.raises(ProtocolError, match="dead kept the learner waiting for slot 0 and lost it: restart"):
        await ask(broadcaster, follow("dead", 0, 0))
    assert (await ask(broadcaster, follow("dead", None, -1))).version == 2


async def test_what_it_does_not_answer_is_refused():
    with pytest.raises(ProtocolError, match="the broadcaster does not answer locate"):
        await ask(Broadcaster(Weights()), Locate(service="learner", wait_ms=0))

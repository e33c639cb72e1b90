"""A short round of tests/protocol/fuzz.py, and that its corpus knows every message."""

from __future__ import annotations

import structlog

from protocol.codec import decode
from protocol.messages import BODIES
from tests.protocol import fuzz


def test_the_corpus_holds_a_valid_message_of_every_type():
    types = {decode(frames).body.type for frames in fuzz.corpus()}
    assert types == set(BODIES) - {body.type for body in fuzz.MOVING}


async def test_mutated_messages_change_nothing_and_are_counted():
    with structlog.testing.capture_logs():
        figures = await fuzz.run(6000, number=1, show=lambda text: None)
    for attacked in ("broker", "client", "events"):
        assert figures[attacked]["refused"] > figures[attacked]["messages"] // 3
    for attacked in ("broker", "reward_server"):
        memory = figures[attacked]["memory_mib"]
        assert memory[-1] < memory[0] + 30

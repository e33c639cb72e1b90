"""Finds the broker of a run folder, and asks it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TypeVar

from protocol.channel import Client
from protocol.messages import Body

ANSWER_S = 5.0
Answer = TypeVar("Answer", bound=Body)


def running_broker(run_folder: Path) -> str | None:
    """The address of the broker of a run folder, if it runs on this host."""
    try:
        announced = json.loads((run_folder / "broker.json").read_text())
        os.kill(announced["pid"], 0)
    except PermissionError:
        pass
    except (OSError, ValueError):
        return None
    address: str = announced["address"]
    return address


async def ask(broker: str, body: Body, answer: type[Answer]) -> Answer:
    """The answer of the broker at an address. Raises Unreachable or ProtocolError."""
    client = Client(broker)
    try:
        answered, _ = await client.request(body, answer, deadline_s=ANSWER_S)
    finally:
        await client.close()
    return answered

"""Reward functions that do what the completion tells them; the tests name them by this file's path."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def doubled(safety: float, reward: float = 1.0) -> float:
    return 2 * safety * reward


def obey(completion: str) -> Any:
    match completion:
        case "hang":
            time.sleep(3600)
        case "exit":
            os._exit(7)
        case "leave":
            sys.exit("enough")
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise KeyError("no such key")
        case "pid":
            return os.getpid()
    return answer(completion)


async def obey_later(completion: str) -> Any:
    match completion:
        case "hang":
            await asyncio.get_running_loop().create_future()
        case "raise":
            raise TimeoutError("the judge is busy")
    return answer(completion)


def answer(completion: str) -> Any:
    special: dict[str, Any] = {
        "none": None,
        "nan": float("nan"),
        "text": "1.0",
        "list": [1.0],
        "true": True,
        "array": np.float64(0.25),
        "huge": 1e300,
    }
    return special[completion] if completion in special else float(completion)


class Crowd:
    """Answers how many calls are going on at once."""

    def __init__(self) -> None:
        self.now = 0

    async def __call__(self) -> float:
        self.now += 1
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            return float(self.now)
        finally:
            self.now -= 1


class Visits:
    """Answers which visit to this object it is."""

    def __init__(self, start: int) -> None:
        self.visits = start

    def __call__(self, completion: str) -> int:
        self.visits += 1
        return self.visits


class Unwilling:
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("no index at /data")

    def __call__(self, completion: str) -> float:
        return 1.0


def second_time_right(tally: str) -> float:
    """Fails until the file has a line."""
    with Path(tally).open("a+") as file:
        file.seek(0)
        tries = len(file.readlines())
        file.write("tried\n")
    if tries == 0:
        raise ConnectionError("not yet")
    return 1.0


def tell_and_hang(fifo: str) -> float:
    """Writes its process's id, then goes on for ever."""
    with open(fifo, "w") as file:
        file.write(str(os.getpid()))
    while True:
        pass


def every_argument(**arguments: Any) -> float:
    return float(len(arguments))


def two_of_the_row(completion: str, answer: str, level: int, *, scale: float = 1.0) -> float:
    return scale * level * (completion == answer)


not_a_function = 3

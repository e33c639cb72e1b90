"""The prompt source: which row comes next. Deterministic by seed and epoch, whoever asks."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from services.broker.dataset import Dataset
from shared.errors import DataError
from shared.group import Prompt


class PromptSource:
    """Goes through a dataset epoch by epoch, shuffled anew in each.

    position: prompts drawn so far, those given back and drawn again not counted twice.
    """

    def __init__(self, dataset: Dataset, *, seed: int, shuffle: bool) -> None:
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._returned: deque[Prompt] = deque()
        self._order: list[int] = []
        self._order_epoch = -1
        self.position = 0

    def draw(self) -> Prompt:
        """The next prompt: one that was given back, or the next row."""
        if self._returned:
            return self._returned.popleft()
        prompt = self.at(self.position)
        self.position += 1
        return prompt

    def give_back(self, prompt: Prompt) -> None:
        """Have a prompt drawn again, before any other."""
        self._returned.append(prompt)

    def state(self) -> dict[str, Any]:
        """Plain values for `restore`."""
        return {
            "position": self.position,
            "returned": [[prompt.row, prompt.epoch] for prompt in self._returned],
            "data": self._data(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where another source of the same data was. Raises DataError where it was of other data."""
        if state["data"] != self._data():
            raise DataError(
                f"the journal belongs to other data: {state['data']} there, {self._data()} in this config; begin a new "
                "run for other data, another seed or another order"
            )
        self.position = state["position"]
        self._returned = deque(self.prompt(row, epoch) for row, epoch in state["returned"])

    def _data(self) -> dict[str, Any]:
        return {"rows": len(self._dataset), "seed": self._seed, "shuffle": self._shuffle}

    def at(self, position: int) -> Prompt:
        """The prompt at a position of the endless sequence of epochs."""
        epoch, place = divmod(position, len(self._dataset))
        if epoch != self._order_epoch:
            self._order = list(range(len(self._dataset)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._order_epoch = epoch
        return self.prompt(self._order[place], epoch)

    def prompt(self, row: int, epoch: int) -> Prompt:
        """A row of the dataset as the prompt of an epoch."""
        return Prompt(row, epoch, self._dataset.content(row), self._dataset.fields(row))


def first_prompts(dataset: Dataset, count: int) -> list[Prompt]:
    """The first rows of a dataset, for evaluations."""
    return [Prompt(row, 0, dataset.content(row), dataset.fields(row)) for row in range(min(count, len(dataset)))]


def total_steps(rows: int, prompts_per_step: int, steps: int | None, epochs: int | None) -> int:
    """Updates of a run: the smaller of `steps` and as many whole steps as the epochs' prompts fill."""
    limits = [steps] if steps is not None else []
    if epochs is not None:
        limits.append(rows * epochs // prompts_per_step)
    return min(limits)

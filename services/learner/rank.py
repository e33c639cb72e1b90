"""A rank of the learner beside rank 0: it does what that one tells it, on the same trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.compute.checkpoint import optimizer_tensors
from services.learner.batch import StepBatch
from services.learner.crew import Crew
from services.learner.trainer import Trainer, load_trainer
from shared.config import parse_config
from shared.errors import OutOfMemory, StrettoError
from shared.group import Columns, Prompt, TrajectoryGroup
from shared.log import log

NO_PROMPT = Prompt(row=-1, epoch=-1, content="")
"""The learner knows prompts as tokens alone."""


def follow(crew: Crew) -> None:
    """Until rank 0 leaves."""
    rank = Rank(crew)
    for order, columns, values in crew.orders():
        try:
            getattr(rank, order)(columns, **values)
        except OutOfMemory:
            raise  # rank 0 waits for this one, and torchrun ends it
        except StrettoError as error:  # rank 0 has it too, and knows what follows
            log.warning("an order failed", order=order, error=str(error))


class Rank:
    """The orders, by their names."""

    _trainer: Trainer
    _batch: StepBatch

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    def load(self, _: list[Columns], config: dict[str, Any], total_steps: int, checkpoint: str | None) -> None:
        """As load_trainer."""
        location = None if checkpoint is None else Path(checkpoint)
        self._trainer = load_trainer(parse_config(config), total_steps, location, self._crew)

    def prepare(self, columns: list[Columns], names: list[str]) -> None:
        """As of Trainer; the batch is kept."""
        self._batch = self._trainer.prepare(_groups(columns, names))

    def update(self, _: list[Columns]) -> None:
        """As of Trainer."""
        self._trainer.update(self._batch)

    def self_check(self, columns: list[Columns]) -> None:
        """As of Trainer."""
        self._trainer.self_check(_groups(columns, [""]))

    def write_snapshot(self, _: list[Columns], tensors: dict[str, Any]) -> None:
        """As of the backend, without tensors to write to."""
        self._trainer.backend.write_snapshot(tensors)

    def score(self, _: list[Columns], tokens: list[int]) -> None:
        """As of the backend."""
        self._trainer.backend.score(tokens)

    def capture(self, _: list[Columns]) -> None:
        """The part of all ranks in a checkpoint, which rank 0 writes."""
        self._trainer.backend.capture()
        optimizer_tensors(self._trainer)


def _groups(columns: list[Columns], names: list[str]) -> list[TrajectoryGroup]:
    return [TrajectoryGroup(name, "train", NO_PROMPT, 0, part) for name, part in zip(names, columns, strict=True)]

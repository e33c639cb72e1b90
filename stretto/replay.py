"""`stretto replay`: trains the learner alone on the groups of a run, in the order in which they were consumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import xxhash

from services.broker.journal import FILE, Journal
from services.broker.runlog import latest_records
from shared.config import load_config
from shared.errors import DataError


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One update. then: its metrics as the run wrote them; weights: XXH3 (64 bits, in hex) of all master weights."""

    version: int
    groups: int
    metrics: dict[str, float]
    then: dict[str, float]
    weights: str


def replay(run_folder: Path, version: int) -> Iterator[ReplayedStep]:
    """Make the updates after `version` again, from its checkpoint (0: the run's model), as far as the journal goes.

    With one thread two replays give the same weights, bit by bit. Raises DataError where the checkpoint or the groups
    are gone, or the run still goes on.
    """
    import torch

    from services.compute.checkpoint import Checkpoints
    from services.learner.trainer import load_trainer

    config = load_config(run_folder / "config.yaml")
    if not (run_folder / FILE).is_file():
        raise DataError(f"{run_folder} has no {FILE}: there is nothing to replay")
    journal = Journal(run_folder / FILE, "normal", dict)
    try:
        state, entries = journal.saved_state(), journal.read_consumed(version)
    finally:
        journal.close()
    if state is None or not entries or entries[0].turn is None or entries[0].turn[0] != version + 1:
        first = entries[0].turn[0] - 1 if entries and entries[0].turn else None
        raise DataError(
            f"the journal of {run_folder} has no groups of version {version + 1}; "
            + (f"it begins after version {first}" if first is not None else "nothing was trained after that")
        )
    torch.set_num_threads(1)
    checkpoints = Checkpoints(run_folder / "checkpoints", config.checkpoint)
    trainer = load_trainer(config, state["total_steps"], checkpoints.at(version) if version else None)
    then = {record["version"]: record for record in latest_records(run_folder / "metrics.jsonl")}
    for number, batch in groupby(entries, key=lambda entry: entry.turn and entry.turn[0]):
        groups = [entry.group for entry in batch]
        metrics = trainer.step(groups)
        trainer.backend.use_snapshot(None)  # compute with the new weights
        weights = xxhash.xxh3_64()
        for parameter in trainer.backend.parameters.values():
            weights.update(parameter.detach().numpy().data)
        yield ReplayedStep(trainer.version, len(groups), metrics, then.get(number or 0, {}), weights.hexdigest())

"""Checkpoints: the model as a Hugging Face folder, with optimizer, schedule, RNG, version and config beside it.

The services that train save and restore them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from services.compute.optimizer import Optimizer, copied, sharded_like
from shared.config import Checkpoint, RunConfig, dump_config
from shared.errors import DataError

FORMAT = 1
STATE_FILE = "stretto.json"
OPTIMIZER_FILE = "optimizer.safetensors"
CONFIG_FILE = "run.yaml"


class Model(Protocol):
    """What a checkpoint needs of a model."""

    parameters: dict[str, torch.Tensor]

    def capture(self) -> Callable[[Path], None]:
        """Copy it; what comes back writes the copy as a Hugging Face folder, or a peft folder."""


class Trained(Protocol):
    """What is saved and restored. state: numbers that are carried from step to step."""

    config: RunConfig
    version: int
    state: dict[str, float]
    optimizer: Optimizer

    @property
    def backend(self) -> Model:
        """The model."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The state of a trainer at a version, apart from the trainer, which may train on while this is written.

    write_model: writes the weights into a folder. optimizer: its tensors by name, as `optimizer_tensors` copies them.
    state: what STATE_FILE holds. config: as YAML.
    """

    version: int
    write_model: Callable[[Path], None]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]
    config: str


def capture(trainer: Trained, lineage: int) -> Captured:
    """Copy all that a checkpoint holds. In the thread that trains; where ranks share a policy, on rank 0."""
    state = {
        "format": FORMAT,
        "version": trainer.version,
        "lineage": lineage,
        "schedule_steps": trainer.optimizer.steps,
        "state": dict(trainer.state),
    }
    write_model = trainer.backend.capture()
    return Captured(trainer.version, write_model, optimizer_tensors(trainer), state, dump_config(trainer.config))


class Checkpoints:
    """The checkpoints of a run, `folder/checkpoint-<version>`: the newest `keep_last` and each `keep_every`th."""

    def __init__(self, folder: Path, keep: Checkpoint) -> None:
        self.folder = folder
        self._keep = keep

    def save(self, trainer: Trained, lineage: int) -> Path:
        """Copy a trainer's state and write it; see `write`."""
        return self.write(capture(trainer, lineage))

    def write(self, captured: Captured) -> Path:
        """Write a checkpoint aside, rename it, and delete those that are too old. Returns its folder.

        In any thread, one at a time.
        """
        target = self.folder / f"checkpoint-{captured.version}"
        aside = self.folder / f".checkpoint-{captured.version}.partial"
        for unfinished in self.folder.glob(".checkpoint-*.partial"):
            shutil.rmtree(unfinished)
        aside.mkdir(parents=True)
        captured.write_model(aside)
        save_file(captured.optimizer, aside / OPTIMIZER_FILE)
        (aside / STATE_FILE).write_text(json.dumps(captured.state, indent=1))
        (aside / CONFIG_FILE).write_text(captured.config)
        _sync(aside)
        if target.exists():
            _remove(target)
        aside.rename(target)
        _sync_folder(self.folder)
        for old in self._all()[: -self._keep.keep_last]:
            if self._keep.keep_every is None or version_of(old) % self._keep.keep_every:
                _remove(old)
        return target

    def oldest(self) -> int:
        """The version of the oldest checkpoint that the run can go on from: of the newest `keep_last`."""
        return version_of(self._all()[-self._keep.keep_last :][0])

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        return max(self._all(), key=version_of, default=None)

    def at(self, version: int) -> Path:
        """The checkpoint of a version. Raises DataError where there is none."""
        found = {version_of(path): path for path in self._all()}
        if version not in found:
            there = ", ".join(map(str, found)) or "none"
            raise DataError(f"{self.folder} has no checkpoint of version {version}; there are: {there}")
        return found[version]

    def _all(self) -> list[Path]:
        complete = [path for path in self.folder.glob("checkpoint-*") if (path / STATE_FILE).is_file()]
        return sorted(complete, key=version_of)


def version_of(checkpoint: Path) -> int:
    """The version that a checkpoint is of."""
    return int(checkpoint.name.rpartition("-")[2])


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint: a kill in the middle leaves none that looks complete."""
    (checkpoint / STATE_FILE).unlink()
    shutil.rmtree(checkpoint)


def restore(checkpoint: Path, trainer: Trained) -> None:
    """Give a trainer, whose backend was loaded from this checkpoint, the rest of its state.

    Raises DataError where something is missing or belongs to another model or format.
    """
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text())
        tensors = load_file(checkpoint / OPTIMIZER_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"the checkpoint {checkpoint} cannot be read: {error}; resume from an older one") from None
    if state.get("format") != FORMAT:
        raise DataError(f"the checkpoint {checkpoint} has format {state.get('format')}; this version reads {FORMAT}")
    try:
        version, schedule_steps, rng = state["version"], state["schedule_steps"], tensors.pop("rng")
    except KeyError as missing:
        raise DataError(f"the checkpoint {checkpoint} lacks {missing}; resume from an older one") from None
    trainer.version, trainer.optimizer.steps = version, schedule_steps
    trainer.state = trainer.state | state.get("state", {})
    torch.set_rng_state(rng)
    adamw = trainer.optimizer.adamw
    for name, parameter in trainer.backend.parameters.items():
        found = {key: tensors.pop(f"{key}.{name}") for key in _KEYS if f"{key}.{name}" in tensors}
        if not found:
            continue
        if len(found) < len(_KEYS) or any(found[key].shape != parameter.shape for key in ("exp_avg", "exp_avg_sq")):
            raise DataError(f"the optimizer state of {name} in {checkpoint} is not whole, or of another shape than it")
        adamw.state[parameter] = {key: sharded_like(tensor, parameter) for key, tensor in found.items()}
    if tensors:
        raise DataError(f"{checkpoint} holds optimizer state of {next(iter(tensors))}, which the model does not have")


_KEYS = ("step", "exp_avg", "exp_avg_sq")


def optimizer_tensors(trainer: Trained) -> dict[str, torch.Tensor]:
    """A copy of the optimizer's state by name, whole, on rank 0. Where ranks share a policy all of them call it."""
    state: Any = trainer.optimizer.adamw.state
    tensors = {
        f"{key}.{name}": copied(state[parameter][key])
        for name, parameter in trainer.backend.parameters.items()
        if parameter in state
        for key in _KEYS
    }
    return tensors | {"rng": torch.get_rng_state()}


def _sync(folder: Path) -> None:
    """Have the files on the disk before the rename makes them the checkpoint."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

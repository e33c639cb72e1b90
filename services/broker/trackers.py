"""What shows the figures of a run beside its own files: TensorBoard and Weights & Biases, by the config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from services.broker.tensorboard import EventFile
from services.broker.wandb import Wandb
from shared.config import RunConfig
from shared.errors import ConfigError
from shared.log import log


class Trackers:
    """All of them. One that fails is told nothing more, and does not end the run. warn: told of it in a sentence."""

    def __init__(self, config: RunConfig, folder: Path, run_id: str, version: int, warn: Callable[[str], None]) -> None:
        """version: where the run stands. Raises ConfigError where one cannot begin and the run has not begun either."""
        self._warn = warn
        self._open: list[EventFile | Wandb] = []
        if config.metrics.tensorboard:
            self._open.append(EventFile(folder / "tensorboard", version))
        if config.metrics.wandb is not None:
            try:
                self._open.append(Wandb(config, folder, run_id))
            except ConfigError as error:
                if version == 0:
                    raise
                warn(str(error))

    def log(self, version: int, figures: Mapping[str, float | None]) -> None:
        """Tell the figures of a version; those without a value are left out."""
        there = {name: value for name, value in figures.items() if value is not None}
        self._tell(lambda tracker: tracker.log(version, there))

    def rewind(self, version: int) -> None:
        """The steps after `version` are made again."""
        self._tell(lambda tracker: tracker.rewind(version))

    def close(self) -> None:
        """The run has ended."""
        self._tell(lambda tracker: tracker.close())

    def _tell(self, what: Callable[[EventFile | Wandb], None]) -> None:
        for tracker in list(self._open):
            try:
                what(tracker)
            except Exception as error:
                self._open.remove(tracker)
                log.exception("a tracker failed", tracker=type(tracker).__name__)
                self._warn(f"{type(tracker).__name__} is told nothing more: {type(error).__name__}: {error}")

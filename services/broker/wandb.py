"""Weights & Biases, where the config names a project: an optional dependency, and never what ends a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shared.config import RunConfig
from shared.errors import ConfigError

FINISH_S = 300.0
"""Time to send what is not sent yet when the run ends; `wandb sync` sends what is left."""


class Wandb:
    """One run there, which goes on when the broker starts again. WANDB_MODE=offline keeps it in the run folder."""

    def __init__(self, config: RunConfig, folder: Path, run_id: str) -> None:
        """Raises ConfigError where wandb is not installed, or cannot begin."""
        try:
            import wandb
        except ModuleNotFoundError:
            raise ConfigError(
                "metrics.wandb needs wandb, which is not installed: pip install 'stretto[wandb]'"
            ) from None
        try:
            self._run = wandb.init(
                project=config.metrics.wandb,
                name=config.name,
                id=run_id,
                resume="allow",
                dir=folder,
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(console="off", finish_timeout=FINISH_S),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"wandb cannot begin: {error}; WANDB_MODE=offline needs neither key nor network"
            ) from None
        self._run.define_metric("*", step_metric="version")

    def log(self, version: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a version."""
        self._run.log({"version": version, **figures})

    def rewind(self, version: int) -> None:
        """Steps that are made again stand there twice, with their lineage: nothing can be taken back."""

    def close(self) -> None:
        """Have everything sent that is not yet, as far as there is time."""
        self._run.finish()

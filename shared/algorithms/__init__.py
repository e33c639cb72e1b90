"""Algorithms: stages, a pure advantage function and a pure loss function. `load_algorithm` finds one by its name."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from shared.algorithms.base import Algorithm, Clipped
from shared.algorithms.cispo import CISPO
from shared.algorithms.dapo import DAPO
from shared.algorithms.dr_grpo import DrGRPO
from shared.algorithms.grpo import GRPO
from shared.algorithms.gspo import GSPO
from shared.algorithms.ppo import PPO
from shared.algorithms.reinforce_pp import ReinforcePP
from shared.algorithms.remax import ReMax
from shared.algorithms.rloo import RLOO
from shared.algorithms.safe_rlhf import SafeRLHF
from shared.config import Algorithm as AlgorithmConfig
from shared.errors import ConfigError
from shared.plugins import load_plugin

PRESETS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "rloo": RLOO,
    "reinforce_pp": ReinforcePP,
    "ppo": PPO,
    "remax": ReMax,
    "safe_rlhf": SafeRLHF,
}

__all__ = ["PRESETS", "Algorithm", "Clipped", "load_algorithm"]


def load_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that the config names, with its settings.

    Raises ConfigError for an unknown name or setting, PluginError where user code cannot be loaded.
    """
    kind: Any = PRESETS.get(config.name)
    if kind is None and ":" in config.name:
        kind = load_plugin(config.name)
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ConfigError(
            f"algorithm.name {config.name!r} is neither a preset ({', '.join(PRESETS)}) nor package.module:Class or "
            "path/to/file.py:Class of a shared.algorithms.Algorithm"
        )
    try:
        return kind(**(config.model_extra or {}))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"algorithm.{name}: {first['msg']}; {config.name} has the settings {', '.join(kind.model_fields)}"
        ) from None

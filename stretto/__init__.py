"""Stretto: asynchronous reinforcement-learning post-training of language models, as a set of long-running services.

`__all__` has the names that stay as they are from one minor version to the next; the rest may change.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shared.version import __version__

if TYPE_CHECKING:
    from shared.config import RunConfig
    from shared.errors import ConfigError, RunStopped, StrettoError
    from stretto.devices import ResourcePool
    from stretto.hybrid import CostOp, GenerateOp, HybridExecutor, HybridGraph, RewardOp, ScoreOp, UpdateOp
    from stretto.trainer import GRPOTrainer, PPOTrainer, ReMaxTrainer, Result, SafeRLHFTrainer, Trainer

__all__ = [
    "ConfigError",
    "CostOp",
    "GRPOTrainer",
    "GenerateOp",
    "HybridExecutor",
    "HybridGraph",
    "PPOTrainer",
    "ReMaxTrainer",
    "ResourcePool",
    "Result",
    "RewardOp",
    "RunConfig",
    "RunStopped",
    "SafeRLHFTrainer",
    "ScoreOp",
    "StrettoError",
    "Trainer",
    "UpdateOp",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: `import stretto` itself is quick."""
    for module in ("shared.errors", "shared.config", "stretto.devices", "stretto.trainer", "stretto.hybrid"):
        if name in __all__ and hasattr(found := import_module(module), name):
            return getattr(found, name)
    raise AttributeError(f"stretto has no {name!r}; it has {', '.join(__all__)}")

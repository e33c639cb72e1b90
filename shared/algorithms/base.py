"""What an algorithm is. Nothing here or in a subclass talks to a service or a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from shared.algorithms.losses import Aggregation
from shared.config import RunConfig
from shared.errors import ConfigError
from shared.graph import LEARNER_NEEDS, ROLLOUT, Stage, reward_stage

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class LossInput:
    """What a loss is computed from; all tensors are [T], one row a token that counts.

    logprobs: float32 log-probs under the policy that is trained, with gradient; old_logprobs: float32 proximal
    log-probs, those the engine reported while sampling; advantages: float32; sample: int64 index of the token's sample;
    n_samples: number of samples in this micro-batch.
    """

    logprobs: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    sample: torch.Tensor
    n_samples: int


class Algorithm(BaseModel, ABC):
    """Base of all algorithms: a class whose fields are its settings.

    A subclass gives `advantages` and `loss`, and `stages` where it needs more than rollout, reward and learner.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    group_baseline: ClassVar[bool] = True
    """Whether the samples of a group are compared with each other, so that a group of one teaches nothing."""

    aggregation: Aggregation = "token_mean"

    def stages(self, config: RunConfig) -> list[Stage]:
        """The stages of a run, the learner last."""
        reward = reward_stage(signal.name for signal in config.reward.signals)
        return [ROLLOUT, reward, Stage("learner", needs=LEARNER_NEEDS, provides=frozenset())]

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError where the run's config makes no sense for the algorithm."""
        if self.group_baseline and config.samples_per_prompt < 2:
            raise ConfigError(
                f"{type(self).__name__} compares the samples of one prompt: samples_per_prompt must be at least 2, "
                f"not {config.samples_per_prompt}"
            )

    @abstractmethod
    def advantages(self, rewards: np.ndarray) -> np.ndarray:
        """[n] float64 advantages of the samples of one group from their [n] float64 rewards, all valid."""

    @abstractmethod
    def loss(self, batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of each token ([T], minimised) and, for the metrics, further [T] tensors whose means are logged."""

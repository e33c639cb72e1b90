"""What an algorithm is. Nothing here or in a subclass talks to a service or a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from shared.algorithms import advantages, losses
from shared.algorithms.losses import KL, Aggregation, Correction
from shared.config import RunConfig
from shared.errors import ConfigError
from shared.graph import (
    REFERENCE,
    CriticName,
    Stage,
    critic_stage,
    learner_stage,
    rollout_stage,
    scoring_stage,
)

if TYPE_CHECKING:
    import torch

State = Mapping[str, float]
"""Numbers that an algorithm carries from step to step: logged, and part of every checkpoint."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """What advantages are computed from: the n valid samples of one prompt with their T tokens; numbers are float64.

    rewards: [n]; lengths: [n] int64, tokens of each sample; mask: [T] bool, tokens that count; max_tokens: most tokens
    a sample could have. state: of the algorithm. kl: [T] of each token between the policy that sampled it and the
    reference, times the coefficient, where `kl_in` is reward; else 0. costs: [n], values and cost_values: [T],
    greedy_reward: of the greedy answer; NaN each where the run has none.
    """

    rewards: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    max_tokens: int
    state: State
    kl: np.ndarray
    costs: np.ndarray
    values: np.ndarray
    cost_values: np.ndarray
    greedy_reward: float

    @property
    def scores(self) -> np.ndarray:
        """[n] rewards less the KL of all tokens that count."""
        sample = np.repeat(np.arange(len(self.lengths)), self.lengths)
        of_samples = np.bincount(sample[self.mask], self.kl[self.mask], len(self.lengths))
        return np.asarray(self.rewards - of_samples)

    @property
    def token_rewards(self) -> np.ndarray:
        """[T] −KL of each token, and the reward on the last one that counts."""
        return np.asarray(advantages.on_last_token(self.rewards, self.mask, self.lengths) - self.kl)

    @property
    def token_costs(self) -> np.ndarray:
        """[T] +KL of each token, and the cost on the last one that counts."""
        return np.asarray(advantages.on_last_token(self.costs, self.mask, self.lengths) + self.kl)


@dataclass(slots=True)
class LossInput:
    """What a loss is computed from; all tensors are [T], one row a token that counts.

    logprobs: float32 log-probs under the policy that is trained, with gradient; entropy: float32, with gradient;
    old_logprobs: float32 proximal log-probs, by the algorithm's correction (docs/algorithms.md); behavior_logprobs:
    float32, those the engine reported while sampling; ref_logprobs: float32, of the reference, None without one;
    advantages: float32; sample: int64 index of the token's sample; n_samples: number of samples in this micro-batch;
    state: of the algorithm.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    old_logprobs: torch.Tensor
    behavior_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    sample: torch.Tensor
    n_samples: int
    state: State

    @property
    def ratio(self) -> torch.Tensor:
        """[T] exp(n − o), the importance ratio."""
        return losses.log_ratio(self.logprobs, self.old_logprobs).exp()


class Algorithm(BaseModel, ABC):
    """Base of all algorithms: a class whose fields are its settings.

    A subclass gives `advantages` and `loss`, and says with the class variables what they need beside rewards.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    group_baseline: ClassVar[bool] = True
    """Whether the samples of a group are compared with each other, so that a group of one teaches nothing."""
    greedy_baseline: ClassVar[bool] = False
    """Whether each group has one more sample, greedy and not trained, whose reward is `greedy_reward`."""
    uses_costs: ClassVar[bool] = False
    """Whether a second service scores `costs`."""
    critics: ClassVar[tuple[CriticName, ...]] = ()
    """The value models: `critic` gives values and learns returns, `cost_critic` cost_values and cost_returns."""
    replace_equal: ClassVar[float] = 0.0
    """What the run's `replace_equal` is where the config leaves it open."""

    aggregation: Aggregation = Field("token_mean", description="how the losses of tokens become that of a step")
    whiten: bool = Field(False, description="advantages of a step to mean 0 and variance 1, over its tokens")
    truncated: Literal["train", "exclude"] = Field(
        "train", description="samples cut off at max_tokens: like any other, or in the baseline but not in the loss"
    )
    correction: Correction = Field("none", description="for data of other policies than the one that is trained")
    correction_level: Literal["token", "sequence"] = Field("token", description="its ratio: of a token or of a sample")
    correction_cap: float = Field(2.0, gt=0, description="tis, decoupled: largest weight")
    correction_band: tuple[float, float] = Field((0.5, 2.0), description="mask: ratios outside are left out")
    entropy_coefficient: float = Field(0.0, ge=0, description="weight of the entropy, which is raised")
    kl_in: Literal["none", "reward", "loss"] = Field("none", description="where the KL to the reference model counts")
    kl_estimator: KL | None = Field(None, description="default: k1 in the reward, k3 in the loss")
    kl_coefficient: float = Field(0.01, ge=0, description="weight of the KL; at the start, where there is a target")
    kl_target: float | None = Field(None, gt=0, description="KL a token that the coefficient is adapted to")
    kl_horizon: float = Field(10_000, gt=0, description="samples over which it is adapted")

    def stages(self, config: RunConfig) -> list[Stage]:
        """The stages of a run, the learner last."""
        stages = [rollout_stage(greedy=self.greedy_baseline)]
        for name, (scoring, after) in config.scoring.items():
            if name != "cost" or self.uses_costs:
                stages.append(scoring_stage(name, (signal.name for signal in scoring.signals), after))
        if self.kl_in != "none":
            stages.append(REFERENCE)
        stages += [critic_stage(critic) for critic in self.critics]
        normalized = [signal.name for signal in config.reward.signals if signal.normalize]
        return [*stages, learner_stage(stages, normalized)]

    def samples(self, config: RunConfig) -> int:
        """Samples of a training group, those that are not trained included."""
        return config.samples_per_prompt + self.greedy_baseline

    def check(self, config: RunConfig) -> None:
        """Raises ConfigError where the run's config makes no sense for the algorithm."""
        name = type(self).__name__
        if self.group_baseline and config.samples_per_prompt < 2:
            raise ConfigError(
                f"{name} compares the samples of one prompt: samples_per_prompt must be at least 2, "
                f"not {config.samples_per_prompt}"
            )
        if config.replace_equal and self.samples(config) < 2:
            raise ConfigError("replace_equal compares the samples of one prompt, and there is one: leave it at 0")
        if self.uses_costs and config.cost is None:
            raise ConfigError(f"{name} needs a cost: name its signals in `cost`, as in `reward`")
        if config.cost is not None and not self.uses_costs:
            raise ConfigError(f"{name} has no use for `cost`: use safe_rlhf, or make it a signal of negative weight")
        if self.kl_target is not None and self.kl_in == "none":
            raise ConfigError("algorithm.kl_target adapts the KL's coefficient, but algorithm.kl_in is none")

    @abstractmethod
    def advantages(self, group: ScoredGroup) -> np.ndarray | dict[str, np.ndarray]:
        """Advantages of a group: [n] float64 one a sample, or [T] one a token.

        With critics, a map of `advantages` and of what the critics learn: `returns`, `cost_returns` ([T] each).
        """

    @abstractmethod
    def loss(self, batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The policy loss of each token ([T], minimised), and more [T] tensors whose means are metrics.

        What the settings of this class add (correction, KL, entropy) is not part of it.
        """

    def initial_state(self) -> dict[str, float]:
        """The state before the first step."""
        return {} if self.kl_in == "none" else {"kl_coefficient": self.kl_coefficient}

    def before_step(self, state: State, samples: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The state that a step is computed with. samples: `rewards`, `costs` and `lags` of its N valid samples."""
        return dict(state)

    def after_step(self, state: State, metrics: Mapping[str, float]) -> dict[str, float]:
        """The state after a step, from its metrics: the KL's coefficient moves towards the target.

        β · (1 + clip(KL / target − 1, ±0.2) · samples / horizon): Ziegler et al., arXiv 1909.08593, eq. 3.
        """
        if self.kl_target is None or "kl/reference" not in metrics:
            return dict(state)
        error = np.clip(metrics["kl/reference"] / self.kl_target - 1, -0.2, 0.2)
        factor = 1 + error * metrics["train/samples"] / self.kl_horizon
        return {**state, "kl_coefficient": float(state["kl_coefficient"] * max(factor, 0.0))}

    @property
    def zero_advantage_teaches(self) -> bool:
        """Whether a sample adds to the gradient also where its advantage is 0."""
        return self.kl_in == "loss" or self.entropy_coefficient > 0

    def estimate_kl(self, logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
        """[T] KL of the policy to the reference, by the estimator of the settings."""
        estimator = self.kl_estimator or ("k3" if self.kl_in == "loss" else "k1")
        return losses.KL_ESTIMATORS[estimator](logprobs, ref_logprobs)

    def objective(self, batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """What is minimised, [T], and what is measured: the loss with correction, KL and entropy."""
        loss, measures = self.loss(batch)
        if self.correction != "none":
            weight, measures["correction/cut"] = self._weights(batch)
            measures["correction/weight"] = weight
            loss = loss * weight
        if batch.ref_logprobs is not None:
            kl = self.estimate_kl(batch.logprobs, batch.ref_logprobs)
            measures["kl/reference"] = kl.detach()
            if self.kl_in == "loss":
                loss = loss + batch.state["kl_coefficient"] * kl
        if self.entropy_coefficient > 0:
            loss = loss - self.entropy_coefficient * batch.entropy
        return loss, measures

    def _weights(self, batch: LossInput) -> tuple[torch.Tensor, torch.Tensor]:
        """What the correction multiplies each loss by, and where it was capped or left out, [T] each."""
        ratio = losses.importance_ratio(
            batch.old_logprobs, batch.behavior_logprobs, batch.sample, batch.n_samples, self.correction_level
        )
        if self.correction == "mask":
            low, high = self.correction_band
            outside = (ratio < low) | (ratio > high)
            return (~outside).to(ratio.dtype), outside
        return ratio.clamp(max=self.correction_cap), ratio > self.correction_cap


class Clipped(Algorithm):
    """Algorithms with the clipped loss of PPO."""

    clip_low: float = Field(0.2, gt=0, description="the ratio is clipped below 1 − clip_low")
    clip_high: float = Field(0.2, gt=0, description="the ratio is clipped above 1 + clip_high")
    dual_clip: float | None = Field(3.0, gt=1, description="bound of the loss where the advantage is negative")

    def loss(self, batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The clipped surrogate."""
        loss, clipped = losses.clipped_loss(batch.ratio, batch.advantages, **self.clip)
        return loss, {"clip_fraction": clipped}

    @property
    def clip(self) -> dict[str, Any]:
        """The settings of the clip."""
        return {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": self.dual_clip}

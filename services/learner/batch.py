"""From the groups of a step to what the trainer needs: valid samples, their advantages, and the step's denominators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from services.compute.packing import GroupBatch
from shared.algorithms import Algorithm
from shared.algorithms.advantages import whiten
from shared.algorithms.base import ScoredGroup, State
from shared.algorithms.losses import Denominators
from shared.config import RunConfig
from shared.graph import RETURNS, VALUES
from shared.group import Columns, FinishReason, RewardStatus, TrajectoryGroup, split_ragged


@dataclass(frozen=True, slots=True)
class Part:
    """What one optimizer step is made of. groups: those that add to the gradient. whole: those of all its groups."""

    groups: list[GroupBatch]
    whole: Denominators


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All that an update is made of.

    version: the one that it makes. parts: one an optimizer step. state: the algorithm's, that the advantages are
    computed with. lessons: what each critic learns, columns of every group with a valid sample. metrics: rewards,
    lengths and staleness of all groups. fresh_lag: the smallest lag of a sample that adds to the gradient.
    """

    version: int
    parts: list[Part]
    state: State
    lessons: dict[str, list[Columns]]
    metrics: dict[str, float]
    fresh_lag: int

    @property
    def groups(self) -> list[GroupBatch]:
        """All groups that add to the gradient."""
        return [group for part in self.parts for group in part.groups]


def step_batch(
    groups: list[TrajectoryGroup], algorithm: Algorithm, config: RunConfig, version: int, state: State
) -> StepBatch:
    """The batch of an update of the policy `version`.

    Samples without a valid reward or cost are neither in the baseline nor in the loss, truncated ones, by the
    algorithm's setting, not in the loss. A group whose advantages are all 0 is left out of forward and backward where
    its gradient is 0, but counts in the denominators.
    """
    valid = [_Valid(group, version) for group in groups]
    _normalize(valid, config)
    state = algorithm.before_step(
        state, {name: np.concatenate([getattr(v, name) for v in valid]) for name in ("rewards", "costs", "lags")}
    )
    for samples in valid:
        samples.learn(algorithm, state, config.sampling.max_tokens)
    if algorithm.whiten:
        _whiten(valid)
    batches = [samples.batch() for samples in valid]
    n_parts = min(config.learner.updates, len(groups))
    parts = [_part(batches[i::n_parts], algorithm, config.sampling.max_tokens) for i in range(n_parts)]
    lessons = {
        str(critic): [v.lesson(VALUES[critic], RETURNS[critic]) for v in valid if len(v.tokens)]
        for critic in algorithm.critics
    }
    metrics = _metrics(groups, version) | _step_metrics(valid, parts, lessons)
    lags = [
        int(lag)
        for part in parts
        for batch in part.groups
        for lag, mask in zip(batch.lags, batch.mask, strict=True)
        if mask.any()
    ]
    return StepBatch(version + 1, parts, state, lessons, metrics, min(lags, default=0))


class _Valid:
    """The n samples of a group with valid scores of all stages; their T tokens one after another."""

    def __init__(self, group: TrajectoryGroup, version: int) -> None:
        columns = group.columns
        ok = np.ones(group.n_samples, dtype=bool)
        for name, statuses in columns.items():
            if name in ("reward_status", "cost_status"):
                ok &= statuses == RewardStatus.OK
            elif name.startswith("stage_status/"):
                ok &= statuses != RewardStatus.INVALID
        sampled = group.is_sampled()
        self.greedy_reward = float(columns["rewards"][~sampled][0]) if not sampled.all() else np.nan
        if not ok[~sampled].all():
            ok[:] = False  # without its baseline the group teaches nothing
        self.group = group
        self.chosen = np.flatnonzero(ok & sampled)
        of_samples = np.diff(columns["tokens_offsets"])
        self.lengths = of_samples[self.chosen]
        self._of_chosen = np.isin(np.repeat(np.arange(group.n_samples), of_samples), self.chosen)
        self.rewards = columns["rewards"][self.chosen].astype("f8")
        self.costs = self._of_sample("costs")
        began = [int(runs[0, 0]) if len(runs) else version for runs in group.samples("versions")]
        self.lags = version - np.asarray(began, dtype="i8")[self.chosen]
        self.tokens = columns["tokens"][self._of_chosen]
        self.mask = columns["loss_mask"][self._of_chosen]
        self.advantages = np.zeros(len(self.tokens))
        self.returns: dict[str, np.ndarray] = {}

    def of_token(self, name: str) -> np.ndarray:
        """[T] float64 of a column; NaN where the group does not have it."""
        column = self.group.columns.get(name)
        return np.full(len(self.tokens), np.nan) if column is None else column[self._of_chosen].astype("f8")

    def _of_sample(self, name: str) -> np.ndarray:
        column = self.group.columns.get(name)
        return np.full(len(self.chosen), np.nan) if column is None else column[self.chosen].astype("f8")

    def learn(self, algorithm: Algorithm, state: State, max_tokens: int) -> None:
        """Compute advantages and returns; then take out of the loss what the algorithm excludes."""
        if len(self.chosen):
            found = algorithm.advantages(
                ScoredGroup(
                    rewards=self.rewards,
                    lengths=self.lengths,
                    mask=self.mask,
                    max_tokens=max_tokens,
                    state=state,
                    kl=self._kl(algorithm, state),
                    costs=self.costs,
                    values=self.of_token("values"),
                    cost_values=self.of_token("cost_values"),
                    greedy_reward=self.greedy_reward,
                )
            )
            self.returns = {"advantages": found} if isinstance(found, np.ndarray) else dict(found)
            advantages = self.returns.pop("advantages")
            one_a_sample = len(advantages) == len(self.lengths)
            self.advantages = np.repeat(advantages, self.lengths) if one_a_sample else advantages
        if algorithm.truncated == "exclude":
            finish = self.group.columns["finish_reasons"][self.chosen]
            self.mask = self.mask & np.repeat(finish != FinishReason.LENGTH, self.lengths)

    def _kl(self, algorithm: Algorithm, state: State) -> np.ndarray:
        """[T] KL of the policy that sampled to the reference times its coefficient; 0 where it is not in the reward."""
        if algorithm.kl_in != "reward":
            return np.zeros(len(self.tokens))
        sampled, reference = (torch.from_numpy(self.of_token(n)) for n in ("behavior_logprobs", "ref_logprobs"))
        kl = algorithm.estimate_kl(sampled, reference).nan_to_num(0.0)  # NaN: the engine reported no log-prob
        return np.asarray(state["kl_coefficient"] * kl.numpy())

    def batch(self) -> GroupBatch:
        """What goes through the model."""
        offsets = np.r_[0, np.cumsum(self.lengths)]
        columns = {"behavior_logprobs": self.of_token("behavior_logprobs"), "advantages": self.advantages}
        if "ref_logprobs" in self.group.columns:
            columns["ref_logprobs"] = self.of_token("ref_logprobs")
        return GroupBatch(
            group_id=self.group.group_id,
            prompt=self.group.columns["prompt_tokens"],
            tokens=split_ragged(self.tokens, offsets),
            mask=split_ragged(self.mask, offsets),
            columns={name: split_ragged(column, offsets) for name, column in columns.items()},
            lags=self.lags,
        )

    def lesson(self, values: str, returns: str) -> Columns:
        """What a critic learns of this group."""
        return {
            "prompt_tokens": self.group.columns["prompt_tokens"],
            "tokens": self.tokens,
            "tokens_offsets": np.r_[0, np.cumsum(self.lengths)],
            "loss_mask": self.mask,
            "values": self.of_token(values).astype("f4"),
            "returns": self.returns[returns].astype("f4"),
        }


def _normalize(valid: list[_Valid], config: RunConfig) -> None:
    """Bring each signal that asks for it to mean 0 and deviation 1 over the step, before its weight."""
    for signal in config.reward.signals:
        if not signal.normalize:
            continue
        there = [v.group.columns[f"signal_status/{signal.name}"][v.chosen] == RewardStatus.OK for v in valid]
        raw = [v.group.columns[f"signal/{signal.name}"][v.chosen].astype("f8") for v in valid]
        values = np.concatenate([part[ok] for part, ok in zip(raw, there, strict=True)])
        if not len(values):
            continue
        mean, std = values.mean(), values.std()
        for samples, part, ok in zip(valid, raw, there, strict=True):
            normal = (part - mean) / std if std > 0 else np.zeros(len(part))
            samples.rewards += np.where(ok, signal.weight * (normal - part), 0.0)


def _whiten(valid: list[_Valid]) -> None:
    ends = np.cumsum([len(samples.tokens) for samples in valid])
    flat = whiten(
        np.concatenate([samples.advantages for samples in valid]), np.concatenate([samples.mask for samples in valid])
    )
    for samples, part in zip(valid, np.split(flat, ends[:-1]), strict=True):
        samples.advantages = part


def _part(batches: list[GroupBatch], algorithm: Algorithm, max_tokens: int) -> Part:
    masks = [mask for batch in batches for mask in batch.mask]
    tokens, samples = sum(int(mask.sum()) for mask in masks), sum(bool(mask.any()) for mask in masks)
    teaching = [batch for batch in batches if algorithm.zero_advantage_teaches or _has_advantage(batch)]
    return Part(teaching, Denominators(tokens, samples, max_tokens))


def _has_advantage(batch: GroupBatch) -> bool:
    return any(a[m].any() for a, m in zip(batch.columns["advantages"], batch.mask, strict=True))


def _step_metrics(valid: list[_Valid], parts: list[Part], lessons: Mapping[str, list[Columns]]) -> dict[str, float]:
    advantages = np.concatenate([samples.advantages[samples.mask] for samples in valid])
    costs = np.concatenate([samples.costs for samples in valid])
    metrics = {
        "advantage/abs_mean": float(np.abs(advantages).mean()) if len(advantages) else 0.0,
        "train/groups": float(sum(len(part.groups) for part in parts)),
        "train/tokens": float(sum(part.whole.tokens for part in parts)),
        "train/samples": float(sum(part.whole.samples for part in parts)),
    }
    if len(costs) and not np.isnan(costs).any():
        metrics["cost/mean"] = float(costs.mean())
    for critic, lesson in lessons.items():
        counted = [columns["loss_mask"] for columns in lesson]
        values, returns = (
            np.concatenate([c[name][m] for c, m in zip(lesson, counted, strict=True)] or [np.zeros(0)])
            for name in ("values", "returns")
        )
        if len(returns) and returns.var() > 0:
            metrics[f"{critic}/explained_variance"] = float(1 - (returns - values).var() / returns.var())
    return metrics


def _metrics(groups: list[TrajectoryGroup], version: int) -> dict[str, float]:
    sampled = np.concatenate([group.is_sampled() for group in groups])

    def of_samples(name: str) -> np.ndarray:
        return np.asarray(np.concatenate([group.columns[name] for group in groups])[sampled])

    valid = of_samples("reward_status") == RewardStatus.OK
    rewards = of_samples("rewards")[valid]
    lengths = np.concatenate([np.diff(group.columns["tokens_offsets"]) for group in groups])[sampled]
    runs = np.concatenate([group.columns["versions"] for group in groups])
    lags, weights = version - runs[:, 0], runs[:, 1]
    equal = [group.has_equal_rewards() for group in groups]
    return {
        "reward/mean": float(rewards.mean()) if len(rewards) else float("nan"),
        "reward/std": float(rewards.std()) if len(rewards) else float("nan"),
        "reward/equal_groups": float(np.mean(equal)),
        "reward/invalid": float((~valid).mean()),
        "length/mean": float(lengths.mean()),
        "length/truncated": float((of_samples("finish_reasons") == FinishReason.LENGTH).mean()),
        "staleness/mean": float(np.average(lags, weights=weights)) if weights.sum() else 0.0,
        "staleness/max": float(lags.max()) if len(lags) else 0.0,
    }

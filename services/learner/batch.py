"""From the groups of a step to what the trainer needs: valid samples, their advantages, and the step's denominators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shared.algorithms import Algorithm
from shared.algorithms.losses import Denominators
from shared.group import FinishReason, RewardStatus, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One group with at least one sample that teaches something.

    prompt: [P] int32; tokens, logprobs, mask: one array a sample ([T_i] int32, float32, bool); advantages: [n] float64;
    lags: [n] int64, versions by which the learner is ahead of the weights that began a sample.
    Only the samples whose reward is valid are here.
    """

    group_id: str
    prompt: np.ndarray
    tokens: list[np.ndarray]
    logprobs: list[np.ndarray]
    mask: list[np.ndarray]
    advantages: np.ndarray
    lags: np.ndarray


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All that an update is made of.

    groups: those that add to the gradient. whole: denominators of the step, in which the samples of all groups count.
    metrics: rewards, lengths and staleness of all groups. fresh_lag: the smallest lag of a sample in `groups`.
    """

    groups: list[GroupBatch]
    whole: Denominators
    metrics: dict[str, float]
    fresh_lag: int


def step_batch(groups: list[TrajectoryGroup], algorithm: Algorithm, version: int, max_tokens: int) -> StepBatch:
    """The batch of an update of the policy `version`.

    Samples without a valid reward are neither in the baseline nor in the loss. A group whose advantages are all 0 is
    left out of forward and backward, since its gradient is 0, but counts in the denominators.
    """
    taught: list[GroupBatch] = []
    n_tokens = n_samples = 0
    advantages: list[np.ndarray] = []
    for group in groups:
        batch = _valid_samples(group, algorithm, version)
        n_tokens += sum(int(mask.sum()) for mask in batch.mask)
        n_samples += sum(bool(mask.any()) for mask in batch.mask)
        advantages.append(batch.advantages)
        if batch.advantages.any():
            taught.append(batch)
    whole = Denominators(tokens=n_tokens, samples=n_samples, max_tokens=max_tokens)
    metrics = _metrics(groups, version) | {
        "advantage/abs_mean": float(np.abs(np.concatenate(advantages)).sum()) / max(sum(map(len, advantages)), 1),
        "train/groups": float(len(taught)),
        "train/tokens": float(n_tokens),
        "train/samples": float(n_samples),
    }
    lags = [int(lag) for batch in taught for lag, mask in zip(batch.lags, batch.mask, strict=True) if mask.any()]
    return StepBatch(taught, whole, metrics, min(lags, default=0))


def _valid_samples(group: TrajectoryGroup, algorithm: Algorithm, version: int) -> GroupBatch:
    valid = np.flatnonzero(group.columns["reward_status"] == RewardStatus.OK)
    tokens, logprobs, mask = (group.samples(name) for name in ("tokens", "behavior_logprobs", "loss_mask"))
    rewards = group.columns["rewards"][valid].astype("f8")
    began = [int(runs[0, 0]) if len(runs) else version for runs in group.samples("versions")]
    return GroupBatch(
        group_id=group.group_id,
        prompt=group.columns["prompt_tokens"],
        tokens=[tokens[i] for i in valid],
        logprobs=[logprobs[i] for i in valid],
        mask=[mask[i] for i in valid],
        advantages=algorithm.advantages(rewards) if len(valid) else np.zeros(0),
        lags=version - np.asarray(began, dtype="i8")[valid],
    )


def _metrics(groups: list[TrajectoryGroup], version: int) -> dict[str, float]:
    status = np.concatenate([group.columns["reward_status"] for group in groups])
    valid = status == RewardStatus.OK
    rewards = np.concatenate([group.columns["rewards"] for group in groups])[valid]
    lengths = np.concatenate([np.diff(group.columns["tokens_offsets"]) for group in groups])
    finish = np.concatenate([group.columns["finish_reasons"] for group in groups])
    runs = np.concatenate([group.columns["versions"] for group in groups])
    lags, weights = version - runs[:, 0], runs[:, 1]
    equal = [group.has_equal_rewards() for group in groups]
    return {
        "reward/mean": float(rewards.mean()) if len(rewards) else float("nan"),
        "reward/std": float(rewards.std()) if len(rewards) else float("nan"),
        "reward/equal_groups": float(np.mean(equal)),
        "reward/invalid": float((~valid).mean()),
        "length/mean": float(lengths.mean()),
        "length/truncated": float((finish == FinishReason.LENGTH).mean()),
        "staleness/mean": float(np.average(lags, weights=weights)) if weights.sum() else 0.0,
        "staleness/max": float(lags.max()) if len(lags) else 0.0,
    }

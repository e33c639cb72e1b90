"""A trajectory group: the n samples of one prompt, with the columns that stages add. Everything that moves is one.

A column is a numpy array with a name. Ragged columns (one run of values a sample) are stored flat, with a second
column `<name>_offsets` of cumulative lengths. No stage rewrites a column of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Any, Literal

import numpy as np

Lane = Literal["train", "eval"]
Columns = dict[str, np.ndarray]

# n samples, T tokens over all samples, P prompt tokens, R version runs over all samples
COLUMNS: dict[str, tuple[str, str]] = {
    "prompt_tokens": ("i4", "[P] token ids of the prompt, chat template applied"),
    "tokens": ("i4", "[T] token ids that the policy produced, ragged by tokens_offsets"),
    "tokens_offsets": ("i8", "[n+1]"),
    "loss_mask": ("bool", "[T] tokens that the policy chose and that count in the loss"),
    "behavior_logprobs": ("f4", "[T] log-prob of each token under the distribution it was sampled from"),
    "versions": ("i4", "[R, 2] runs (policy version, number of tokens), ragged by versions_offsets"),
    "versions_offsets": ("i8", "[n+1]"),
    "finish_reasons": ("u1", "[n] FinishReason"),
    "text": ("u1", "the decoded samples as UTF-8, ragged by text_offsets"),
    "text_offsets": ("i8", "[n+1]"),
    "rewards": ("f4", "[n] weighted sum of the signals, 0 where reward_status is not OK"),
    "reward_status": ("u1", "[n] RewardStatus"),
    "reward_reasons": ("u1", "why a reward is not OK, as UTF-8, ragged by reward_reasons_offsets"),
    "reward_reasons_offsets": ("i8", "[n+1]"),
    "costs": ("f4", "[n] weighted sum of the cost signals, 0 where cost_status is not OK"),
    "cost_status": ("u1", "[n] RewardStatus"),
    "cost_reasons": ("u1", "why a cost is not OK, as UTF-8, ragged by cost_reasons_offsets"),
    "cost_reasons_offsets": ("i8", "[n+1]"),
    "greedy": ("bool", "[n] the sample whose reward is the baseline of the others, which is not trained"),
    "ref_logprobs": ("f4", "[T] log-prob of each token under the reference"),
    "values": ("f4", "[T] the critic's value before each token"),
    "cost_values": ("f4", "[T] the cost critic's"),
}
"""The columns of every run; those of the cost only where it has that stage.

Each signal adds `signal/<name>` (f4 [n]) and `signal_status/<name>` (u1 [n]), each stage of a run's own
`stage/<name>` and `stage_status/<name>`."""


class FinishReason(IntEnum):
    """Why a sample ended."""

    STOP = 0  # an end token or a stop string
    LENGTH = 1  # max_tokens or the context was reached
    ABORTED = 2


class RewardStatus(IntEnum):
    """What a reward or a cost is: a value, an explicit abstention, or a failure. A failure is never a 0."""

    OK = 0
    ABSTAIN = 1
    INVALID = 2


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a dataset, as it is handed to the rollouts and the reward functions.

    row: index in the dataset; epoch: how often the dataset had been gone through before.
    content: chat messages (`[{"role": …, "content": …}, …]`) or plain text.
    fields: the other fields of the row (`answer`, …), given to reward functions by name.
    """

    row: int
    epoch: int
    content: str | list[dict[str, str]]
    fields: dict[str, Any] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        """A map of plain values that msgpack can carry."""
        return {"row": self.row, "epoch": self.epoch, "content": self.content, "fields": self.fields}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Prompt:
        """The inverse of `to_wire`."""
        return cls(wire["row"], wire["epoch"], wire["content"], dict(wire["fields"]))

    @property
    def text(self) -> str:
        """The prompt as a person reads it: the text, or the last message of the chat."""
        return self.content if isinstance(self.content, str) else self.content[-1]["content"]


@dataclass(slots=True)
class TrajectoryGroup:
    """A prompt and the columns that exist so far.

    group_id: unique in the run. min_version: oldest policy version that may start it.
    """

    group_id: str
    lane: Lane
    prompt: Prompt
    min_version: int = 0
    columns: Columns = field(default_factory=dict)

    @property
    def n_samples(self) -> int:
        """Number of samples; 0 before the rollout."""
        offsets = self.columns.get("tokens_offsets")
        return 0 if offsets is None else len(offsets) - 1

    def samples(self, name: str) -> list[np.ndarray]:
        """The ragged column `name`, one array a sample."""
        return split_ragged(self.columns[name], self.columns[offsets_name(name)])

    def texts(self, name: str = "text") -> list[str]:
        """The ragged text column `name`, one string a sample."""
        return [part.tobytes().decode("utf-8", "replace") for part in self.samples(name)]

    def has_equal_rewards(self) -> bool:
        """Whether all valid rewards are equal, so that comparing the samples teaches nothing."""
        valid = self.columns["reward_status"] == RewardStatus.OK
        return len(np.unique(self.columns["rewards"][valid])) < 2

    def is_sampled(self) -> np.ndarray:
        """[n] bool, False for a greedy sample that is there as a baseline."""
        greedy = self.columns.get("greedy")
        return np.ones(self.n_samples, dtype=bool) if greedy is None else ~greedy

    def oldest_version(self) -> int:
        """The oldest policy version that produced any token (the group's minimum where no token was produced)."""
        runs = self.columns.get("versions")
        return self.min_version if runs is None or not len(runs) else int(runs[:, 0].min())


def mean_reward(groups: Sequence[TrajectoryGroup]) -> float:
    """Mean of all valid rewards of these groups, greedy baselines left out; NaN where there is none."""
    valid = [group.is_sampled() & (group.columns["reward_status"] == RewardStatus.OK) for group in groups]
    parts = [group.columns["rewards"][chosen] for group, chosen in zip(groups, valid, strict=True)]
    rewards = np.concatenate(parts) if parts else np.zeros(0)
    return float(rewards.mean()) if len(rewards) else float("nan")


def signal_means(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Mean of the values that each signal gave, greedy baselines left out, as `signal/<name>`."""
    means = {}
    for name in {name for group in groups for name in group.columns if name.startswith("signal/")}:
        status = f"signal_status/{name.removeprefix('signal/')}"
        there = [group for group in groups if name in group.columns]
        chosen = [group.is_sampled() & (group.columns[status] == RewardStatus.OK) for group in there]
        values = np.concatenate([group.columns[name][ok] for group, ok in zip(there, chosen, strict=True)])
        if len(values):
            means[name] = float(values.mean())
    return means


def offsets_name(column: str) -> str:
    """Name of the column with a ragged column's cumulative lengths.

    It is `<column>_offsets`; columns with one value a token share the offsets of `tokens`.
    """
    return "tokens_offsets" if column in TOKEN_COLUMNS else f"{column}_offsets"


TOKEN_COLUMNS = frozenset(
    {"tokens", "loss_mask", "behavior_logprobs", "ref_logprobs", "values", "cost_values", "returns", "cost_returns"}
)


def ragged(name: str, parts: Sequence[np.ndarray | Sequence[Any]], dtype: str) -> Columns:
    """The two columns `name` and `name_offsets` that hold one array a sample."""
    arrays = [np.asarray(part, dtype=dtype) for part in parts]
    offsets = np.zeros(len(arrays) + 1, dtype="i8")
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype=dtype)
    return {name: flat, f"{name}_offsets": offsets}


def split_ragged(flat: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    """One view a sample on a flat column."""
    return [flat[start:end] for start, end in pairwise(offsets)]


def ragged_text(name: str, texts: Sequence[str]) -> Columns:
    """The two columns that hold one UTF-8 string a sample; half a surrogate pair is escaped."""
    return ragged(name, [np.frombuffer(text.encode(errors="backslashreplace"), dtype="u1") for text in texts], "u1")


def version_runs(versions: Sequence[int] | np.ndarray) -> np.ndarray:
    """[R, 2] int32 runs (version, number of tokens) of one sample, from the version of each of its tokens."""
    array = np.asarray(versions, dtype="i4")
    if not len(array):
        return np.zeros((0, 2), dtype="i4")
    starts = np.flatnonzero(np.r_[True, array[1:] != array[:-1]])
    return np.stack([array[starts], np.diff(np.r_[starts, len(array)])], axis=1).astype("i4")

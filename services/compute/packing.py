"""Packs samples into rows that share their prompt: the prompt once, then each sample, which sees the prompt and itself.

Letters: R rows, S length of the longest row, K tokens of all samples in the rows, in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Samples of one group, as they go through a model.

    prompt: [P] int32; tokens, mask: one array a sample ([T_i] int32, bool); columns: what else there is of each token,
    by name, one float array [T_i] a sample; lags: [n] int64, versions by which the learner is ahead of the weights that
    began a sample.
    """

    group_id: str
    prompt: np.ndarray
    tokens: list[np.ndarray]
    mask: list[np.ndarray]
    columns: dict[str, list[np.ndarray]]
    lags: np.ndarray


@dataclass(frozen=True, slots=True)
class Row:
    """Samples of one group in one row."""

    group: GroupBatch
    samples: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens of the row. The last token of a sample is never an input: it is only predicted."""
        return len(self.group.prompt) + sum(len(self.group.tokens[i]) - 1 for i in self.samples)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Input of one forward pass.

    ids, positions: [R, S] int64, padded with 0; segment: [R, S] int32: −1 padding, 0 prompt, i ≥ 1 the i-th sample of
    the row. source: [K] int64, flat index (row · S + column) of the token whose output predicts each sample token;
    target: [K] int64; sample: [K] int64, index of the token's sample; lag: [K] int64, the lag of the token's sample;
    mask: [K] bool; columns: [K] float32 each, those of the groups; n_samples: samples in all rows.
    """

    ids: np.ndarray
    positions: np.ndarray
    segment: np.ndarray
    source: np.ndarray
    target: np.ndarray
    sample: np.ndarray
    lag: np.ndarray
    mask: np.ndarray
    columns: dict[str, np.ndarray]
    n_samples: int

    def attention(self) -> np.ndarray:
        """[R, S, S] bool: token q may attend to token k: both real, k not later, and k in the prompt or q's sample.

        A padding token attends to itself, so that no softmax is empty.
        """
        columns = np.arange(self.ids.shape[1])
        earlier = columns[None, :] <= columns[:, None]
        key, query = self.segment[:, None, :], self.segment[:, :, None]
        allowed = earlier & (key >= 0) & ((key == 0) | (key == query))
        allowed |= np.eye(len(columns), dtype=bool)
        return np.asarray(allowed)


def micro_batches(groups: list[GroupBatch], max_tokens: int) -> list[list[Row]]:
    """Rows in micro-batches of at most `max_tokens` tokens, padding included, each at least one sample.

    Rows of like length go together; a group that is too long for one micro-batch is split between samples.
    """
    return in_batches(rows_of(groups, max_tokens), max_tokens)


def rows_of(groups: list[GroupBatch], max_tokens: int) -> list[Row]:
    """The samples that teach something, those of a group in as few rows of at most `max_tokens` tokens as fit."""
    return [row for group in groups for row in _rows(group, max_tokens)]


def in_batches(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    """Rows in micro-batches, the shortest first."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row.length):
        if batches and row.length * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _rows(group: GroupBatch, max_tokens: int) -> list[Row]:
    rows: list[Row] = []
    for i, tokens in enumerate(group.tokens):
        if not len(tokens) or not group.mask[i].any():
            continue
        longer = Row(group, (*rows[-1].samples, i)) if rows else None
        if longer is not None and longer.length <= max_tokens:
            rows[-1] = longer
        else:
            rows.append(Row(group, (i,)))
    return rows


def halve(rows: list[Row]) -> list[list[Row]]:
    """The rows in two micro-batches of about half the size; [] where they are one sample."""
    if len(rows) > 1:
        middle = (len(rows) + 1) // 2  # the longer rows come last
        return [rows[:middle], rows[middle:]]
    group, samples = rows[0].group, rows[0].samples
    middle = len(samples) // 2
    return [[Row(group, samples[:middle])], [Row(group, samples[middle:])]] if middle else []


def pack(rows: list[Row]) -> PackedRows:
    """The arrays of one micro-batch."""
    width = max(row.length for row in rows)
    ids = np.zeros((len(rows), width), dtype="i8")
    positions = np.zeros_like(ids)
    segment = np.full((len(rows), width), -1, dtype="i4")
    source, sample = [], []
    n_samples = 0
    for r, row in enumerate(rows):
        prompt = row.group.prompt
        end = len(prompt)
        ids[r, :end], positions[r, :end], segment[r, :end] = prompt, np.arange(end), 0
        for place, i in enumerate(row.samples, start=1):
            tokens = row.group.tokens[i]
            inner = slice(end, end + len(tokens) - 1)
            ids[r, inner] = tokens[:-1]
            positions[r, inner] = len(prompt) + np.arange(len(tokens) - 1)
            segment[r, inner] = place
            source.append(r * width + np.r_[len(prompt) - 1, np.arange(inner.start, inner.stop)])
            sample.append(np.full(len(tokens), n_samples))
            end, n_samples = inner.stop, n_samples + 1
    chosen = list(samples_of(rows))
    lengths = [len(group.tokens[i]) for group, i in chosen]
    return PackedRows(
        ids=ids,
        positions=positions,
        segment=segment,
        source=np.concatenate(source).astype("i8"),
        target=np.concatenate([group.tokens[i] for group, i in chosen]).astype("i8"),
        sample=np.concatenate(sample).astype("i8"),
        lag=np.repeat([group.lags[i] for group, i in chosen], lengths),
        mask=np.concatenate([group.mask[i] for group, i in chosen]),
        columns={
            name: np.concatenate([group.columns[name][i] for group, i in chosen]).astype("f4")
            for name in chosen[0][0].columns
        },
        n_samples=n_samples,
    )


def samples_of(rows: Sequence[Row]) -> Iterator[tuple[GroupBatch, int]]:
    """The samples in rows, in the order of their tokens in the packed arrays."""
    return ((row.group, i) for row in rows for i in row.samples)


def unpack(rows: Sequence[Row], values: np.ndarray) -> Iterator[tuple[GroupBatch, int, np.ndarray]]:
    """What a model made of the packed tokens ([K]), sample by sample: its group, its index there, and its [T_i]."""
    ends = np.cumsum([len(group.tokens[i]) for group, i in samples_of(rows)])
    for (group, i), part in zip(samples_of(rows), np.split(values, ends[:-1]), strict=True):
        yield group, i, part

"""Checks the columns that a stage completes a group with, before they enter the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from protocol.codec import DTYPES
from shared.errors import ProtocolError
from shared.group import COLUMNS, TOKEN_COLUMNS, Columns, FinishReason, RewardStatus, TrajectoryGroup


def check_columns(group: TrajectoryGroup, columns: Columns) -> None:
    """Raises ProtocolError `bad_column` where a dtype, a shape, an offset or a value does not fit the group.

    group: with the columns it has so far. columns: all that a stage provides.
    """
    everything = group.columns | columns
    for name, array in columns.items():
        dtype = _rule(name).dtype
        if dtype is not None and array.dtype != dtype:
            raise ProtocolError("bad_column", f"{name} is {array.dtype}, expected {dtype}")
        if array.ndim != (2 if name == "versions" else 1):
            raise ProtocolError("bad_column", f"{name} has {array.ndim} dimensions")
    for name in columns:
        if _rule(name).is_offsets:
            _check_offsets(name, everything)
    n_tokens, n_samples = len(everything.get("tokens", ())), len(everything.get("tokens_offsets", (0,))) - 1
    for name, array in columns.items():
        rule = _rule(name)
        if rule.one_a_token and len(array) != n_tokens:
            raise ProtocolError("bad_column", f"{name} has {len(array)} values for {n_tokens} tokens")
        if rule.one_a_sample and len(array) != n_samples:
            raise ProtocolError("bad_column", f"{name} has {len(array)} values for {n_samples} samples")
        if rule.largest is not None and array.max(initial=0) > rule.largest:
            raise ProtocolError("bad_column", f"{name} holds a value above {rule.largest}")
    if "versions" in columns:
        _check_versions(everything, group.min_version)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a column must be. dtype: None for those that only a run's own stages know."""

    dtype: np.dtype[Any] | None
    is_offsets: bool
    one_a_token: bool
    one_a_sample: bool
    largest: int | None


@cache
def _rule(name: str) -> _Rule:
    """By the name of a column that a stage of the run provides."""
    status = name.startswith(("signal_status/", "stage_status/"))
    signal = name.startswith(("signal/", "stage/"))
    is_offsets = name.endswith("_offsets")
    dtype = (
        COLUMNS[name][0] if name in COLUMNS else "i8" if is_offsets else "u1" if status else "f4" if signal else None
    )
    return _Rule(
        dtype=None if dtype is None else DTYPES[dtype],
        is_offsets=is_offsets,
        one_a_token=name in TOKEN_COLUMNS,
        one_a_sample=status or signal or COLUMNS.get(name, ("", ""))[1].startswith("[n]"),
        largest=max(FinishReason) if name == "finish_reasons" else max(RewardStatus) if "status" in name else None,
    )


def _check_offsets(name: str, columns: Columns) -> None:
    """Cumulative lengths: as many as samples and one more, from 0 to the length of their column."""
    offsets, flat = columns[name], columns.get(name.removesuffix("_offsets"), ())
    samples = len(columns.get("tokens_offsets", offsets))
    rising = (
        len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(flat) and bool((offsets[1:] >= offsets[:-1]).all())
    )
    if not rising or len(offsets) != samples:
        raise ProtocolError("bad_column", f"{name} are not the cumulative lengths of {samples - 1} samples")


def _check_versions(columns: Columns, min_version: int) -> None:
    """The version runs of each sample add up to its tokens, and no token is older than the group allows."""
    runs = columns["versions"]
    if runs.shape[1] != 2 or (len(runs) and (runs[:, 1].min() < 1 or runs[:, 0].min() < min_version)):
        raise ProtocolError("bad_column", f"versions are not runs (version, tokens) from version {min_version} on")
    tokens = np.concatenate(([0], np.cumsum(runs[:, 1], dtype="i8")))[columns["versions_offsets"]]
    if not np.array_equal(tokens, columns["tokens_offsets"]):
        raise ProtocolError("bad_column", "versions do not add up to the tokens of each sample")

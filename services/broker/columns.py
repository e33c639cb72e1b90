"""Checks the columns that a stage completes a group with, before they enter the ledger."""

from __future__ import annotations

import numpy as np

from protocol.codec import DTYPES
from shared.errors import ProtocolError
from shared.group import COLUMNS, TOKEN_COLUMNS, Columns, FinishReason, RewardStatus, TrajectoryGroup, split_ragged


def check_columns(group: TrajectoryGroup, columns: Columns) -> None:
    """Raises ProtocolError `bad_column` where a dtype, a shape, an offset or a value does not fit the group.

    group: with the columns it has so far. columns: all that a stage provides.
    """
    everything = group.columns | columns
    for name, array in columns.items():
        dtype = _dtype(name)
        if dtype is not None and array.dtype != DTYPES[dtype]:
            raise ProtocolError("bad_column", f"{name} is {array.dtype}, expected {dtype}")
        if array.ndim != (2 if name == "versions" else 1):
            raise ProtocolError("bad_column", f"{name} has {array.ndim} dimensions")
    for name in columns:
        if name.endswith("_offsets"):
            _check_offsets(name, everything)
    n_tokens, n_samples = len(everything.get("tokens", ())), len(everything.get("tokens_offsets", (0,))) - 1
    for name, array in columns.items():
        if name in TOKEN_COLUMNS and len(array) != n_tokens:
            raise ProtocolError("bad_column", f"{name} has {len(array)} values for {n_tokens} tokens")
        if _one_a_sample(name) and len(array) != n_samples:
            raise ProtocolError("bad_column", f"{name} has {len(array)} values for {n_samples} samples")
        largest = max(FinishReason) if name == "finish_reasons" else max(RewardStatus) if "status" in name else None
        if largest is not None and array.max(initial=0) > largest:
            raise ProtocolError("bad_column", f"{name} holds a value above {largest}")
    if "versions" in columns:
        _check_versions(everything, group.min_version)


def _dtype(name: str) -> str | None:
    """The dtype that a column must have; None for those that only a run's own stages know."""
    if name in COLUMNS:
        return COLUMNS[name][0]
    if name.endswith("_offsets"):
        return "i8"
    if name.startswith("signal_status/"):
        return "u1"
    return "f4" if name.startswith("signal/") else None


def _one_a_sample(name: str) -> bool:
    return name in ("finish_reasons", "rewards", "reward_status") or name.startswith(("signal/", "signal_status/"))


def _check_offsets(name: str, columns: Columns) -> None:
    """Cumulative lengths: as many as samples and one more, from 0 to the length of their column."""
    offsets, flat = columns[name], columns.get(name.removesuffix("_offsets"), ())
    samples = len(columns.get("tokens_offsets", offsets))
    rising = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(flat) and bool((np.diff(offsets) >= 0).all())
    if not rising or len(offsets) != samples:
        raise ProtocolError("bad_column", f"{name} are not the cumulative lengths of {samples - 1} samples")


def _check_versions(columns: Columns, min_version: int) -> None:
    """The version runs of each sample add up to its tokens, and no token is older than the group allows."""
    runs = columns["versions"]
    if runs.shape[1] != 2 or (len(runs) and (runs[:, 1].min() < 1 or runs[:, 0].min() < min_version)):
        raise ProtocolError("bad_column", f"versions are not runs (version, tokens) from version {min_version} on")
    counted = [int(part[:, 1].sum()) for part in split_ragged(runs, columns["versions_offsets"])]
    if counted != np.diff(columns["tokens_offsets"]).tolist():
        raise ProtocolError("bad_column", "versions do not add up to the tokens of each sample")

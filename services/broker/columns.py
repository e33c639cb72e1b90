"""Checks the columns that a stage completes a group with, before they enter the ledger."""

from __future__ import annotations

import numpy as np

from protocol.codec import DTYPES
from shared.errors import ProtocolError
from shared.group import COLUMNS, TOKEN_COLUMNS, Columns, TrajectoryGroup


def check_columns(group: TrajectoryGroup, columns: Columns) -> None:
    """Raises ProtocolError `bad_column` where a dtype, an offset or a length does not fit the group.

    group: with the columns it has so far.
    """
    everything = group.columns | columns
    samples = len(everything["tokens_offsets"]) - 1 if "tokens_offsets" in everything else None
    for name, array in columns.items():
        dtype = _expected_dtype(name)
        if dtype is not None and array.dtype != DTYPES[dtype]:
            raise ProtocolError("bad_column", f"{name} is {array.dtype}, expected {dtype}")
        if name.endswith("_offsets"):
            _check_offsets(name, array, everything, samples)
        elif name in TOKEN_COLUMNS and "tokens" in everything and len(array) != len(everything["tokens"]):
            raise ProtocolError("bad_column", f"{name} has {len(array)} values for {len(everything['tokens'])} tokens")
        elif _one_a_sample(name) and array.shape != (samples,):
            raise ProtocolError("bad_column", f"{name} has the shape {array.shape} for {samples} samples")
    runs = columns.get("versions")
    if runs is not None and (runs.ndim != 2 or runs.shape[1] != 2 or runs[:, 1].sum() != len(everything["tokens"])):
        raise ProtocolError("bad_column", "versions are not runs (version, tokens) that add up to the tokens")


def _expected_dtype(name: str) -> str | None:
    if name in COLUMNS:
        return COLUMNS[name][0]
    if name.startswith("signal/"):
        return "f4"
    return "u1" if name.startswith("signal_status/") else None


def _one_a_sample(name: str) -> bool:
    return name in ("finish_reasons", "rewards", "reward_status") or name.startswith(("signal/", "signal_status/"))


def _check_offsets(name: str, offsets: np.ndarray, columns: Columns, samples: int | None) -> None:
    flat = columns.get(name.removesuffix("_offsets"))
    fits = (
        offsets.ndim == 1
        and len(offsets) > 0
        and offsets[0] == 0
        and bool((np.diff(offsets) >= 0).all())
        and (flat is None or offsets[-1] == len(flat))
        and (samples is None or len(offsets) == samples + 1)
    )
    if not fits:
        raise ProtocolError("bad_column", f"{name} are not the cumulative lengths of {samples} samples")

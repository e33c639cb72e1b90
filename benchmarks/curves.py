"""Pictures of the runs of benchmarks/algorithms.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cells import CORRECTIONS, PRESETS, STALENESS, THRESHOLD

Groups = dict[tuple[str, str], list[dict[str, Any]]]
"""Runs by part and name, one a seed."""


def draw(groups: Groups, folder: Path) -> None:
    """Write every picture that there are runs for."""
    parts = {part for part, _ in groups}
    if "presets" in parts:
        _presets(groups, folder)
    if ("presets", "ppo") in groups:
        _explained_variance(groups, folder)
    if "safe" in parts:
        _safe(groups, folder)
    if "staleness" in parts:
        _staleness(groups, folder)


def _presets(groups: Groups, folder: Path) -> None:
    figure, axes = plt.subplots(2, 5, figsize=(12, 4.8), sharex=True, sharey=True)
    for axis, name in zip(axes.flat, PRESETS, strict=True):
        runs = groups.get(("safe" if name == "safe_rlhf" else "presets", name), [])
        if runs:
            _band(axis, *_heldout(runs), color="C0")
        axis.set_title(name, fontsize=10)
    _label(axes[:, 0], axes[-1], "held-out reward")
    _save(figure, folder / "algorithms.png")


def _explained_variance(groups: Groups, folder: Path) -> None:
    figure, axis = plt.subplots(figsize=(5, 3))
    _band(axis, *_metric(groups["presets", "ppo"], "critic/explained_variance"), color="C0")
    axis.axhline(0.3, color="grey", linestyle=":")
    axis.set_ylim(-1, 1)
    _label([axis], [axis], "explained variance of PPO's critic")
    _save(figure, folder / "explained_variance.png")


def _safe(groups: Groups, folder: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(11, 3))
    for color, name in zip(("C1", "C0"), ("ppo", "safe_rlhf"), strict=True):
        if runs := groups.get(("safe", name)):
            _band(axes[0], *_metric(runs, "bonus"), color=color, label=name)
            _band(axes[2], *_heldout(runs), color=color, label=name)
            if name == "safe_rlhf":
                _band(axes[1], *_metric(runs, "algorithm/multiplier"), color=color)
    axes[0].axhline(THRESHOLD, color="grey", linestyle=":")
    axes[0].legend()
    for axis, title in zip(axes, ("mean cost", "multiplier λ", "held-out reward"), strict=True):
        _label([axis], [axis], title)
    _save(figure, folder / "safe_rlhf.png")


def _staleness(groups: Groups, folder: Path) -> None:
    figure, axes = plt.subplots(1, len(STALENESS), figsize=(13, 3), sharey=True)
    for axis, staleness in zip(axes, STALENESS, strict=True):
        for i, correction in enumerate(CORRECTIONS):
            if runs := groups.get(("staleness", f"{staleness}-{correction}")):
                _band(axis, *_heldout(runs), color=f"C{i}", label=correction)
        axis.set_title(f"max_staleness {staleness}", fontsize=10)
    axes[0].legend(fontsize=8)
    _label([axes[0]], axes, "held-out reward")
    _save(figure, folder / "staleness.png")


def _heldout(runs: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Versions [K], and rewards [seeds, K]."""
    versions = np.array([version for version, _ in runs[0]["evaluations"]])
    return versions, np.array([[reward for _, reward in run["evaluations"]] for run in runs], dtype=float)


def _metric(runs: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    values = np.array([run["metrics"][name] for run in runs], dtype=float)
    return np.arange(1, values.shape[1] + 1), values


def _band(axis: Axes, x: np.ndarray, values: np.ndarray, *, color: str, label: str | None = None) -> None:
    """The mean over seeds, and the range between them."""
    axis.plot(x, np.nanmean(values, axis=0), color=color, label=label)
    axis.fill_between(x, np.nanmin(values, axis=0), np.nanmax(values, axis=0), color=color, alpha=0.2, linewidth=0)


def _label(left: Any, bottom: Any, title: str) -> None:
    for axis in left:
        axis.set_ylabel(title)
    for axis in bottom:
        axis.set_xlabel("version")


def _save(figure: Figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=80)
    plt.close(figure)

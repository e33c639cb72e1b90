"""Reading samples back: which groups are found, and what a person sees of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shared.errors import DataError
from stretto.samples import find_groups, show_group


def record(group: str, version: int, rewards: list[float], lane: str = "train") -> dict[str, Any]:
    return {
        "group": group,
        "lane": lane,
        "version": version,
        "row": 7,
        "epoch": 0,
        "prompt": "What is 3+6?",
        "fields": {"answer": "9"},
        "texts": ["9", "I think\n[bold]8"],
        "rewards": rewards,
        "reward_status": ["ok", "ok" if len(set(rewards)) > 1 else "invalid"],
        "reasons": ["", "exact gave no answer in 30 s"],
        "signals": {"exact": [rewards[0], None]},
        "finish": ["stop", "length"],
        "versions": [[[3, 1]], [[3, 4], [4, 2]]],
    }


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    records = [
        record("g1", 1, [0.0, 0.5]),
        record("g2", 1, [1.0, 0.5]),
        record("g3", 2, [0.9, 0.0]),
        record("g4", 2, [0.3, 0.3], lane="eval"),
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path


def names(records: list[dict[str, Any]]) -> list[str]:
    return [r["group"] for r in records]


def test_the_latest_training_groups_are_found_in_their_order(run_folder: Path) -> None:
    assert names(find_groups(run_folder, count=2)) == ["g2", "g3"]


def test_groups_are_found_by_version_lane_and_id(run_folder: Path) -> None:
    assert names(find_groups(run_folder, version=1)) == ["g1", "g2"]
    assert names(find_groups(run_folder, lane="eval")) == ["g4"]
    assert names(find_groups(run_folder, group="g4")) == ["g4"]


def test_the_best_and_the_worst_are_found_by_their_mean_reward(run_folder: Path) -> None:
    assert names(find_groups(run_folder, count=2, order="best")) == ["g2", "g3"]
    assert names(find_groups(run_folder, count=1, order="worst")) == ["g1"]


def test_what_does_not_fit_or_is_no_run_is_said(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no group"):
        find_groups(run_folder, version=9)
    with pytest.raises(DataError, match="not the folder of a run"):
        find_groups(tmp_path / "elsewhere")


def test_a_group_shows_prompt_answers_rewards_signals_and_versions(run_folder: Path) -> None:
    out = io.StringIO()
    show_group(Console(file=out, width=160), find_groups(run_folder, group="g4")[0])
    text = out.getvalue()
    assert "g4  version 2  row 7  answer: 9" in text
    assert "What is 3+6?" in text
    assert "invalid: exact gave no answer in 30 s" in text
    assert "3×4, 4×2" in text
    assert r"I think\n[bold]8" in text

"""The report of a run, from a small run folder made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import DataError
from stretto.report import make_report


def write(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def step(version: int, time: float, **metrics: Any) -> dict[str, Any]:
    return {"version": version, "time": time, "train/samples": 64.0, "train/tokens": 256.0} | metrics


def evaluation(version: int, accuracy: float) -> dict[str, Any]:
    return {"version": version, "accuracy": accuracy, "reward": 0.1, "oldest_version": version, "newest_version": 9}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    status = {
        "name": "sums",
        "state": "finished",
        "stop_reason": "all 3 steps are done",
        "version": 3,
        "started": 100.0,
        "groups": {},
        "bottleneck": "the learner",
        "services": [],
        "departed": [{"instance": "learner", "time": {"compute": 5.0}, "figures": {"memory/peak_mib": 800.0}}],
    }
    (tmp_path / "status.json").write_text(json.dumps(status))
    spans = [("learner", 110, 114), ("rollout-0", 108, 112)]
    write(tmp_path / "spans.jsonl", [{"instance": i, "start": a, "end": b, "bucket": "compute"} for i, a, b in spans])
    write(tmp_path / "metrics.jsonl", [step(1, 110.0), step(2, 114.0), step(3, 118.0)])
    write(tmp_path / "evaluations.jsonl", [evaluation(0, 0.25), evaluation(3, 0.75)])
    return tmp_path


def test_the_report_has_accuracy_overlap_rates_memory_and_time(run_folder: Path) -> None:
    make_report(run_folder)
    figures = json.loads((run_folder / "report.json").read_text())
    assert (figures["heldout_accuracy_before"], figures["heldout_accuracy_after"]) == (0.25, 0.75)
    assert figures["overlap_ratio"] == pytest.approx(0.5)
    assert (figures["sequences_per_s"], figures["tokens_per_s"], figures["step_s"]) == (16.0, 64.0, 4.0)
    assert (figures["steps"], figures["wall_s"]) == (3, 18.0)
    assert figures["peak_memory_mib"] == {"learner": 800.0}
    assert figures["time"] == {"learner": {"compute": 5.0}}


def test_the_report_has_the_drift_of_all_steps_and_that_of_the_own_version_apart(run_folder: Path) -> None:
    def drifted(version: int, lag: int, *figures: float) -> dict[str, Any]:
        names = ("drift/mean", "drift/max", "kl", "drift/fresh/mean", "drift/fresh/max", "drift/fresh/k3")
        return step(version, version, **dict(zip(names, figures, strict=True)) | {"drift/fresh/lag": lag})

    steps = [drifted(1, 0, 0.25, 2.0, 0.5, 0.0, 0.5, 0.25), step(2, 2), drifted(3, 1, 0.75, 1.0, 0.25, 9.0, 9.0, 9.0)]
    write(run_folder / "metrics.jsonl", [*steps, drifted(4, 0, 0.5, 0.5, 0.75, 0.5, 0.25, 0.75)])
    figures = make_report(run_folder)
    assert (figures["drift_mean"], figures["drift_max"], figures["kl_mean"]) == (0.5, 2.0, 0.5)
    own = [figures[f"drift_own_{name}"] for name in ("steps", "mean", "max", "k3")]
    assert own == [2, 0.25, 0.5, 0.5]
    page = (run_folder / "report.md").read_text()
    assert "0.25 nats on average, at most 0.5, k3 0.5, in 2 of 3 steps" in page


def test_the_page_links_the_pictures_that_are_there(run_folder: Path) -> None:
    make_report(run_folder)
    page = (run_folder / "report.md").read_text()
    for picture in ("curves.png", "timeline.png"):
        assert f"({picture})" in page and (run_folder / picture).stat().st_size > 0


def test_a_resumed_run_counts_each_version_once_and_the_pause_not_at_all(run_folder: Path) -> None:
    before = [step(1, 10.0), step(2, 14.0), step(3, 18.0)]
    write(run_folder / "metrics.jsonl", [*before, step(3, 110.0), step(4, 112.0)])
    figures = make_report(run_folder)
    assert (figures["sequences_per_s"], figures["step_s"], figures["wall_s"]) == (32.0, 2.0, 12.0)


def test_a_folder_without_a_run_or_without_a_step_has_no_report(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not the folder of a run"):
        make_report(tmp_path / "elsewhere")
    (run_folder / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="no step"):
        make_report(run_folder)

"""Spans of time: unions, overlaps, and the share of the learner's work during which a rollout generates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.timeline import draw_timeline, overlap_ratio, overlap_s, read_spans, union


def test_a_union_joins_spans_that_touch_or_overlap() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_an_overlap_counts_each_second_once() -> None:
    assert overlap_s([(0, 4), (6, 10)], [(1, 2), (3, 7), (9, 20)]) == 1 + 1 + 1 + 1


def test_the_ratio_is_the_share_of_updates_during_which_any_rollout_generates() -> None:
    spans = {"learner": [(10, 20)], "rollout-0": [(0, 12)], "rollout-1": [(11, 15), (18, 30)], "reward-0": [(15, 18)]}
    assert overlap_ratio(spans) == pytest.approx((5 + 2) / 10)


def test_the_ratio_leaves_out_what_the_learner_did_before_the_first_generation() -> None:
    assert overlap_ratio({"learner": [(0, 10), (12, 14)], "rollout-0": [(8, 13)]}) == pytest.approx((2 + 1) / (2 + 2))


def test_services_that_take_turns_do_not_overlap() -> None:
    assert overlap_ratio({"learner": [(2, 4), (6, 8)], "rollout-0": [(0, 2), (4, 6)]}) == 0


def test_without_a_rollout_or_an_update_there_is_no_ratio() -> None:
    assert overlap_ratio({"learner": [(0, 1)]}) is None
    assert overlap_ratio({"rollout-0": [(0, 1)]}) is None


def test_spans_are_read_by_instance_and_bucket(tmp_path: Path) -> None:
    rows = [("rollout-0", 3, 4, "compute"), ("rollout-0", 1, 2, "compute"), ("rollout-0", 2, 3, "room")]
    lines = [json.dumps({"instance": i, "start": a, "end": b, "bucket": k}) for i, a, b, k in rows]
    (tmp_path / "spans.jsonl").write_text("\n".join(lines))
    assert read_spans(tmp_path) == {"rollout-0": [(1, 2), (3, 4)]}


def test_the_timeline_is_a_picture(tmp_path: Path) -> None:
    draw_timeline({"learner": [(2, 4)], "rollout-0": [(0, 3)], "broadcaster": [(0, 1)]}, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")

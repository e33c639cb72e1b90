"""What a run looks like while it goes, on a terminal and off it."""

from __future__ import annotations

import builtins
import copy
import io
import sys
from typing import Any

from rich.console import Console

from stretto.live import PlainView, console_here, draw, duration

METRICS = {
    "reward/generated": 0.25,
    "loss": -0.01,
    "staleness/mean": 0.5,
    "staleness/max": 1.0,
    "drift/mean": 0.012,
    "drift/max": 0.8,
    "drift/fresh/mean": 0.002,
    "drift/fresh/max": 0.1,
    "drift/fresh/k3": 1e-5,
    "drift/fresh/lag": 0.0,
}
STATUS: dict[str, Any] = {
    "name": "sums",
    "run_folder": "runs/sums",
    "state": "running",
    "version": 2,
    "steps": 10,
    "eta_s": 75.0,
    "sequences_per_s": 27.6,
    "tokens_per_s": 130.0,
    "saved_version": -1,
    "metrics": METRICS,
    "history": [{"version": 1, "reward/generated": 0.125, "loss": 0.0}, {"version": 2} | METRICS],
    "evaluations": [{"version": 0, "accuracy": 0.125, "reward": 0.2, "prompts": 64, "scored": 63}],
    "groups": {
        "train": {
            "admitted": 24,
            "consumed": 16,
            "dropped": {"stale": 1},
            "dead": 2,
            "in_flight": 5,
            "queued": {"reward": 2},
            "leased": {"rollout": 3},
        }
    },
    "services": [{"instance": "learner", "state": "SERVING", "time": {"compute": 3.0, "groups": 1.0}, "figures": {}}],
    "departed": [{"instance": "rollout-1", "state": "SERVING", "time": {"compute": 1.0, "room": 1.0}, "figures": {}}],
    "bottleneck": "the learner: it computes 75% of its time, the rollouts wait 50%",
    "warnings": [],
}


def lines(*statuses: dict[str, Any]) -> list[str]:
    """What a plain view prints of a series of statuses."""
    out = io.StringIO()
    view = PlainView(Console(file=out, width=80))
    for status in statuses:
        view.update(status)
    return out.getvalue().splitlines()


def test_each_step_is_one_line_also_where_a_status_was_missed() -> None:
    printed = [line for line in lines(STATUS, STATUS) if line.startswith("step")]
    assert len(printed) == 2
    assert printed[0].startswith("step 1/10  reward 0.125")
    assert "drift -" in printed[0] and "drift 0.012 (max 0.8)  freshest 0.002 (max 0.1, k3 1e-05, lag 0)" in printed[1]
    assert "staleness 0.5 (max 1)" in printed[1] and "27.6 samples/s" in printed[1] and "left 1 min 15 s" in printed[1]


def test_evaluations_checkpoints_and_warnings_are_lines_that_come_once() -> None:
    later = copy.deepcopy(STATUS) | {"saved_version": 2, "warnings": ["rollout-0 was not heard of any more"]}
    printed = lines(STATUS, later, later)
    assert printed.count("evaluation at version 0: accuracy 0.125, reward 0.2 (63 of 64 prompts scored)") == 1
    assert printed.count("checkpoint of version 2 saved") == 1
    assert printed.count("warning: rollout-0 was not heard of any more") == 1


def test_a_new_evaluation_is_a_line_also_where_the_status_has_forgotten_an_older_one() -> None:
    results = [STATUS["evaluations"][0] | {"version": version} for version in (0, 20, 40)]
    printed = lines(STATUS | {"evaluations": results[:2]}, STATUS | {"evaluations": [results[0], results[2]]})
    assert [line.split(":")[0] for line in printed if line.startswith("evaluation")] == [
        "evaluation at version 0",
        "evaluation at version 20",
        "evaluation at version 40",
    ]


def test_the_terminal_shows_progress_account_services_and_bottleneck() -> None:
    out = io.StringIO()
    Console(file=out, width=160).print(draw(STATUS, ["reward-0: it fell over; started again in 1 s"]))
    text = out.getvalue()
    assert "step 2/10" in text
    assert (
        "24 admitted = 16 consumed + 1 dropped + 2 dead + 5 in flight (queued 2 for reward; leased 3 at rollout)"
        in text
    )
    assert "0.012 (max 0.8)" in text and "0.002 (max 0.1, k3 1e-05, lag 0)" in text
    assert "compute 75%, groups 25%" in text
    assert "rollout-1" in text
    assert STATUS["bottleneck"] in text
    assert "started again in 1 s" in text


def test_before_the_first_step_nothing_is_made_up() -> None:
    empty = STATUS | {"version": 0, "metrics": {}, "history": [], "evaluations": [], "eta_s": None}
    assert lines(empty) == []
    out = io.StringIO()
    Console(file=out, width=120).print(draw(empty | {"sequences_per_s": None, "tokens_per_s": None}, []))
    assert "- left" in out.getvalue()


def test_durations_are_said_as_a_person_says_them() -> None:
    assert [duration(s) for s in (None, 59.4, 61, 7260)] == ["-", "59 s", "1 min 01 s", "2 h 01 min"]


def test_a_notebook_is_no_terminal_though_its_output_says_so(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert console_here().is_terminal
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    console = console_here()
    console.print("step 1/2", style="bold")
    assert not console.is_terminal
    assert sys.stdout.getvalue() == "step 1/2\n"

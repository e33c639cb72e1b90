"""When a version is evaluated, and what comes out."""

from __future__ import annotations

import numpy as np
import pytest

from services.broker.evaluation import Evaluations
from shared.config import parse_config
from shared.group import Prompt, TrajectoryGroup

PROMPTS = [Prompt(i, 0, f"{i}?") for i in range(2)]


def evaluations(every=3, total_steps=7, prompts=PROMPTS, **changes):
    signals = [{"name": "exact", "function": "exact_match"}, {"name": "short", "function": "length"}]
    tree = {
        "model": "none",
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "steps": total_steps,
        "data": {"train": "none"},
        "reward": {"signals": signals},
        "evaluation": {"every": every, "metric": "short"},
    }
    return Evaluations(parse_config(tree | changes), prompts, total_steps)


def group(short, version=0, status=0):
    columns = {
        "versions": np.array([[version, 3]], dtype="i4"),
        "rewards": np.array([short + 1], dtype="f4"),
        "reward_status": np.array([status], dtype="u1"),
    }
    for name, value in (("exact", 1.0), ("short", short)):
        columns |= {f"signal/{name}": np.array([value], dtype="f4")}
        columns |= {f"signal_status/{name}": np.array([status], dtype="u1")}
    return TrajectoryGroup("g", "eval", PROMPTS[0], 0, columns)


def test_the_first_each_so_many_and_the_last_version_are_evaluated():
    rounds = evaluations(every=3, total_steps=7)
    assert [version for version in range(8) if rounds.due(version)] == [0, 3, 6, 7]


def test_a_version_is_due_once():
    rounds = evaluations()
    assert rounds.due(0) == PROMPTS and rounds.due(0) == []


def test_a_resumed_run_evaluates_the_version_it_begins_with():
    assert evaluations(every=3).due(4) == PROMPTS


def test_nothing_is_due_without_heldout_prompts():
    rounds = evaluations(prompts=[])
    assert rounds.due(0) == [] and rounds.complete(7)


def test_the_result_is_the_mean_over_valid_samples_of_the_metric_chosen():
    rounds = evaluations()
    rounds.due(0)
    assert rounds.add(group(0.5, version=0), 0) is None
    result = rounds.add(group(1.0, version=2), 0)
    assert (result["accuracy"], result["reward"]) == (0.75, 1.75)
    assert result["signals"] == {"exact": 1.0, "short": 0.75}
    assert (result["prompts"], result["scored"]) == (2, 2)
    assert (result["version"], result["oldest_version"], result["newest_version"]) == (0, 0, 2)
    assert rounds.results == [result]


def test_a_failed_reward_is_left_out_and_never_a_zero():
    rounds = evaluations()
    rounds.due(0)
    rounds.add(group(1.0), 0)
    result = rounds.add(group(0.0, status=2), 0)
    assert (result["accuracy"], result["scored"], result["prompts"]) == (1.0, 1, 2)


def test_a_lost_group_does_not_hold_the_result_up():
    rounds = evaluations()
    rounds.due(0)
    rounds.lose(0)
    assert rounds.add(group(1.0), 0)["scored"] == 1


def test_a_round_of_which_all_is_lost_has_no_accuracy():
    rounds = evaluations()
    rounds.due(0)
    rounds.lose(0)
    assert rounds.lose(0)["accuracy"] is None


@pytest.mark.parametrize("open_groups", [1, 2])
def test_all_is_evaluated_once_the_last_round_is_done(open_groups):
    rounds = evaluations(total_steps=7)
    assert not rounds.complete(7)
    rounds.due(7)
    for _ in range(2 - open_groups):
        rounds.add(group(1.0), 7)
    assert not rounds.complete(7)
    for _ in range(open_groups):
        rounds.add(group(1.0), 7)
    assert rounds.complete(7)


def test_of_many_evaluations_the_first_result_and_the_newest_stay_and_no_group_of_them():
    rounds = evaluations(every=1, total_steps=1000)
    for version in range(300):
        for _ in rounds.due(version):
            rounds.add(group(1.0), version)
    assert [result["version"] for result in rounds.results] == [0, *range(200, 300)]
    assert rounds._rounds == {}


def test_what_was_evaluated_is_not_due_again_after_a_restart_or_a_rewind():
    rounds = evaluations(every=3, total_steps=9)
    for version in (0, 3, 6):
        for _ in rounds.due(version):
            rounds.add(group(1.0), version)
    rounds.restore(rounds.results, unfinished=False)
    assert rounds.due(6) == []
    rounds.rewind(4)
    assert rounds.due(3) == [] and rounds.due(6) == PROMPTS


def test_an_evaluation_tells_the_mean_cost_where_costs_are_scored():
    rounds = evaluations(cost={"signals": [{"name": "harm", "function": "length"}]})
    rounds.due(0)
    groups = [group(0.0), group(0.0)]
    for scored, cost in zip(groups, (1.0, 2.0), strict=True):
        scored.columns |= {"costs": np.array([cost], dtype="f4"), "signal/harm": np.array([cost], dtype="f4")}
        scored.columns |= dict.fromkeys(("cost_status", "signal_status/harm"), np.zeros(1, dtype="u1"))
    rounds.add(groups[0], 0)
    result = rounds.add(groups[1], 0)
    assert (result["cost"], result["signals"]["harm"]) == (1.5, 1.5)

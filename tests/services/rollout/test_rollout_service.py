"""What the rollout service makes of a group, without an engine."""

from __future__ import annotations

from services.rollout.service import priority
from shared.group import Prompt, TrajectoryGroup


def test_evaluation_goes_before_the_oldest_training_group_and_that_before_younger_ones():
    prompt = Prompt(0, 0, "1+1")
    groups = [
        TrajectoryGroup("younger", "train", prompt, min_version=4),
        TrajectoryGroup("oldest", "train", prompt, min_version=0),
        TrajectoryGroup("evaluation", "eval", prompt, min_version=5),
    ]
    assert [group.group_id for group in sorted(groups, key=priority)] == ["evaluation", "oldest", "younger"]

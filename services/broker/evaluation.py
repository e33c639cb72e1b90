"""Rounds of evaluation: which held-out prompts are due at which version, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared.config import RunConfig
from shared.group import Prompt, RewardStatus, TrajectoryGroup

KEPT_RESULTS = 100
"""Newest results that are kept beside the first: they go into every status and every write of the journal. The file
evaluations.jsonl has them all."""


@dataclass(slots=True)
class Round:
    """The evaluation of one version, while it is under way: groups still expected, and those that are done."""

    open: int
    done: list[TrajectoryGroup] = field(default_factory=list)


class Evaluations:
    """The evaluations of a run, at the first version, each `every` versions and the last.

    results: the first and the newest, in their order.
    """

    def __init__(self, config: RunConfig, prompts: list[Prompt], total_steps: int) -> None:
        self._config = config
        self._prompts = prompts
        self._total_steps = total_steps
        self._rounds: dict[int, Round] = {}  # those under way
        self._newest = -1
        self._overdue = False
        self.results: list[dict[str, Any]] = []

    def restore(self, results: list[dict[str, Any]], *, unfinished: bool) -> None:
        """Go on after a restart of the broker. unfinished: an evaluation was under way, and is due again."""
        self.results = results
        self._rounds = {}
        self._newest = max((result["version"] for result in results), default=-1)
        self._overdue = unfinished

    def rewind(self, version: int) -> None:
        """Forget the evaluations of later versions, and those that are not finished."""
        kept = [result for result in self.results if result["version"] <= version]
        self.restore(kept, unfinished=self.unfinished)

    @property
    def unfinished(self) -> bool:
        """Whether an evaluation is under way or overdue."""
        return self._overdue or bool(self._rounds)

    def due(self, version: int) -> list[Prompt]:
        """The prompts to evaluate at a version that has just been reached; told once, and empty when none is due."""
        first = self._newest < 0
        wanted = first or self._overdue or version % self._config.evaluation.every == 0 or version == self._total_steps
        if not self._prompts or not wanted or version <= self._newest:
            return []
        self._newest = version
        self._rounds[version] = Round(open=len(self._prompts))
        self._overdue = False
        return self._prompts

    def add(self, group: TrajectoryGroup, scheduled: int) -> dict[str, Any] | None:
        """A group is evaluated; returns the round's result when it was the last."""
        self._rounds[scheduled].done.append(group)
        return self._close_one(scheduled)

    def lose(self, scheduled: int) -> dict[str, Any] | None:
        """A group will never be evaluated; returns the round's result when it was the last."""
        return self._close_one(scheduled)

    def complete(self, version: int) -> bool:
        """Whether nothing is left to evaluate once `version` is the last."""
        return (not self._prompts or self._newest == version) and not self._rounds

    def _close_one(self, scheduled: int) -> dict[str, Any] | None:
        round_ = self._rounds[scheduled]
        round_.open -= 1
        if round_.open:
            return None
        del self._rounds[scheduled]
        result = self._result(scheduled, round_)
        self.results.append(result)
        del self.results[1:-KEPT_RESULTS]
        return result

    def _result(self, scheduled: int, round_: Round) -> dict[str, Any]:
        """Means over the valid samples of a round, and the policy versions that really answered."""
        groups = round_.done
        stages = (self._config.reward, self._config.cost)
        signals = [signal.name for stage in stages if stage is not None for signal in stage.signals]
        means = {name: _mean(groups, f"signal/{name}", f"signal_status/{name}") for name in signals}
        versions = [int(v) for group in groups for v in group.columns["versions"][:, 0]]
        return {
            "version": scheduled,
            "accuracy": means[self._config.eval_metric],
            "reward": _mean(groups, "rewards", "reward_status"),
            **({"cost": _mean(groups, "costs", "cost_status")} if self._config.cost is not None else {}),
            "signals": means,
            "prompts": len(self._prompts),
            "scored": sum(int((g.columns["reward_status"] == RewardStatus.OK).sum()) for g in groups),
            "oldest_version": min(versions, default=scheduled),
            "newest_version": max(versions, default=scheduled),
        }


def _mean(groups: list[TrajectoryGroup], name: str, status: str) -> float | None:
    values = [g.columns[name][g.columns[status] == RewardStatus.OK] for g in groups if name in g.columns]
    everything = np.concatenate(values) if values else np.zeros(0)
    return float(everything.mean()) if len(everything) else None

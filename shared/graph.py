"""The stages of a run as a graph of the columns they need and provide. The broker hands out groups by it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: a group is ready for it when all columns it `needs` are there and none it `provides` is.

    The stage that provides nothing is the last one: its groups are consumed by a commit.
    """

    name: str
    needs: frozenset[str]
    provides: frozenset[str]
    trains: bool = False
    """Whether training alone needs it, so that evaluation groups pass it by."""


_ROLLOUT = Stage(
    "rollout",
    needs=frozenset(),
    provides=frozenset(
        [
            "prompt_tokens",
            "tokens",
            "tokens_offsets",
            "loss_mask",
            "behavior_logprobs",
            "versions",
            "versions_offsets",
            "finish_reasons",
            "text",
            "text_offsets",
        ]
    ),
)
_SEQUENCES = frozenset({"prompt_tokens", "tokens", "tokens_offsets"})
_FOR_PEOPLE = ("text", "signal", "reward_reasons", "cost_reasons")

REFERENCE = Stage("reference", needs=_SEQUENCES, provides=frozenset({"ref_logprobs"}), trains=True)
CriticName = Literal["critic", "cost_critic"]
VALUES = {"critic": "values", "cost_critic": "cost_values"}
"""The column that each critic provides."""
RETURNS = {"critic": "returns", "cost_critic": "cost_returns"}
"""What each critic learns, by the name under which the algorithm's advantages give it."""


def rollout_stage(*, greedy: bool) -> Stage:
    """The stage that generates. greedy: with a greedy sample in each training group, marked in the column `greedy`."""
    return replace(_ROLLOUT, provides=_ROLLOUT.provides | {"greedy"}) if greedy else _ROLLOUT


def critic_stage(critic: str) -> Stage:
    """The stage of a critic's values."""
    return Stage(critic, needs=_SEQUENCES, provides=frozenset({VALUES[critic]}), trains=True)


def learner_stage(others: Iterable[Stage], signals: Iterable[str] = ()) -> Stage:
    """The last stage, which needs what the others provide, tokens rather than text, but of the signals these alone."""
    columns = {column for stage in others for column in stage.provides}
    needs = {column for column in columns if not column.startswith(_FOR_PEOPLE)}
    needs |= {f"{kind}/{name}" for name in signals for kind in ("signal", "signal_status")}
    return Stage("learner", needs=frozenset(needs), provides=frozenset(), trains=True)


def scores(stage: str) -> tuple[str, str]:
    """The columns of what a stage says of each sample: its value, and its status."""
    if stage in ("reward", "cost"):
        return f"{stage}s", f"{stage}_status"
    return f"stage/{stage}", f"stage_status/{stage}"


def scored_by(column: str) -> str | None:
    """The stage whose value of each sample a column is; None for any other column."""
    if column in ("rewards", "costs"):
        return column.removesuffix("s")
    return column.removeprefix("stage/") if column.startswith("stage/") else None


def scoring_stage(name: str, signals: Iterable[str], after: Iterable[str] = ()) -> Stage:
    """The reward stage, the cost stage, or one of the run's own, with these signals. after: whose scores it needs."""
    provides = {*scores(name)}
    if name in ("reward", "cost"):
        provides |= {f"{name}_reasons", f"{name}_reasons_offsets"}
    for signal in signals:
        provides |= {f"signal/{signal}", f"signal_status/{signal}"}
    needs = {"text", "text_offsets", "tokens_offsets", "finish_reasons"}
    return Stage(name, frozenset(needs.union(*map(scores, after))), frozenset(provides))


def check_graph(stages: Iterable[Stage]) -> list[Stage]:
    """The stages in an order in which they can run.

    Raises ConfigError, naming the stage, where two stages provide one column, a needed column comes from nowhere, or
    stages wait for each other.
    """
    waiting = list(stages)
    provider: dict[str, str] = {}
    for stage in waiting:
        for column in sorted(stage.provides):
            if column in provider:
                raise ConfigError(f"stages {provider[column]} and {stage.name} both provide the column {column}")
            provider[column] = stage.name
    order: list[Stage] = []
    have: set[str] = set()
    while waiting:
        ready = [stage for stage in waiting if stage.needs <= have]
        if not ready:
            stage = waiting[0]
            missing = sorted(stage.needs - have)
            if nowhere := [column for column in missing if column not in provider]:
                raise ConfigError(f"stage {stage.name} needs the column {nowhere[0]}, which no stage provides")
            names = ", ".join(stage.name for stage in waiting)
            raise ConfigError(f"stages {names} wait for each other (for the column {missing[0]}): break the cycle")
        for stage in ready:
            have |= stage.provides
            order.append(stage)
            waiting.remove(stage)
    return order

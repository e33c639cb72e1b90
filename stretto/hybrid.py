"""A run as a graph of operations, each with services of its own: `HybridExecutor(graph).run()`. See docs/python.md."""

from __future__ import annotations

import graphlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.config import NAME, RESERVED
from shared.errors import ConfigError
from stretto.arguments import read_signals
from stretto.trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GenerateOp:
    """Samples answers to the prompts. model, tokenizer: as Trainer's. settings: of the config's section `rollout`."""

    model: Any = None
    tokenizer: Any = None
    sampling: Settings = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoreOp:
    """A stage of the run's own. source: as Trainer's reward_model.

    at_least: samples of a lower score are left out from there on. settings: of a section of `stages`.
    """

    source: Any
    at_least: float | None = None
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardOp:
    """What is trained for. source: as Trainer's reward_model. settings: of the config's section `reward`."""

    source: Any
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CostOp:
    """What is to stay below a threshold, for safe_rlhf; otherwise as RewardOp."""

    source: Any
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdateOp:
    """Trains the model on what the others made of a prompt. settings: of the config's section `learner`."""

    algorithm: str | Settings = "grpo"
    settings: Settings = field(default_factory=dict)


Op = GenerateOp | ScoreOp | RewardOp | CostOp | UpdateOp
STAGES: dict[type, str] = {RewardOp: "reward", CostOp: "cost"}


class HybridGraph:
    """Nodes that are operations, and edges from each to those that come after it."""

    def __init__(self) -> None:
        self.nodes: dict[str, Op] = {}
        self.edges: list[tuple[str, str]] = []

    def add_node(self, name: str, op: Op) -> None:
        """Raises ConfigError for a name that is taken or can be none, and for a second of what there is one of."""
        if name in self.nodes:
            raise ConfigError(f"there is a node {name} already")
        if isinstance(op, ScoreOp) and (not re.fullmatch(NAME, name) or name in RESERVED):
            raise ConfigError(f"{name!r} cannot be the name of a stage: it is a service's, or not like `my_stage`")
        for other, found in self.nodes.items():
            if type(found) is type(op) and not isinstance(op, ScoreOp):
                raise ConfigError(f"nodes {other} and {name} are both a {type(op).__name__}; a graph has one")
        self.nodes[name] = op

    def add_edge(self, before: str, after: str) -> None:
        """Have `after` come after `before`. Raises ConfigError where either is no node."""
        for name in (before, after):
            if name not in self.nodes:
                raise ConfigError(f"there is no node {name!r}; there are {', '.join(self.nodes) or 'none'}")
        self.edges.append((before, after))

    def order(self) -> list[str]:
        """The nodes in an order in which they can run.

        Raises ConfigError, naming the node, where nodes wait for each other, where one is not between generation and
        update, and where a function needs the score of a node that is not before it.
        """
        for kind in (GenerateOp, RewardOp, UpdateOp):
            if not any(isinstance(op, kind) for op in self.nodes.values()):
                raise ConfigError(f"the graph has no {kind.__name__}")
        before = {name: [b for b, after in self.edges if after == name] for name in self.nodes}
        try:
            order = list(graphlib.TopologicalSorter(before).static_order())
        except graphlib.CycleError as error:
            raise ConfigError(f"nodes wait for each other, {' → '.join(error.args[1])}: remove an edge") from None
        first, last = self._only(GenerateOp), self._only(UpdateOp)
        for name in order:
            if name != first and first not in self._before(name):
                raise ConfigError(f"node {name} is not reached from {first}: add_edge({first!r}, {name!r})")
        for name in order:
            if name != last and name not in self._before(last):
                raise ConfigError(f"node {name} does not lead to {last}: add_edge({name!r}, {last!r})")
        self._check_scores()
        return order

    def config(self) -> dict[str, Any]:
        """The run that this graph is, as a Trainer takes it. Raises ConfigError."""
        order = self.order()
        generate, update = self.nodes[self._only(GenerateOp)], self.nodes[self._only(UpdateOp)]
        assert isinstance(generate, GenerateOp) and isinstance(update, UpdateOp)
        algorithm = {"name": update.algorithm} if isinstance(update.algorithm, str) else dict(update.algorithm)
        tree: dict[str, Any] = {
            "model": generate.model,
            "tokenizer": generate.tokenizer,
            "sampling": dict(generate.sampling),
            "rollout": dict(generate.settings),
            "algorithm": algorithm,
            "learner": dict(update.settings),
            "stages": [],
        }
        for name in order:
            match self.nodes[name]:
                case ScoreOp(source, at_least, settings):
                    after = sorted(self._scores(name), key=order.index)
                    section = {"name": name, "signals": read_signals(source, name), "at_least": at_least}
                    tree["stages"].append(section | {"after": [self._stage(b) for b in after]} | dict(settings))
                case RewardOp(source, settings) | CostOp(source, settings) as op:
                    tree[STAGES[type(op)]] = {"signals": read_signals(source, name), **settings}
        return tree

    def draw(self, path: str | Path | None = None) -> Figure:
        """A picture, which a notebook shows; also as a file. Raises ConfigError as `order` does."""
        from matplotlib.figure import Figure

        depth: dict[str, int] = {}
        for name in self.order():
            depth[name] = max((depth[before] + 1 for before, after in self.edges if after == name), default=0)
        rows = {name: [n for n in depth if depth[n] == depth[name]] for name in depth}
        at = {name: (float(x), (len(rows[name]) - 1) / 2 - rows[name].index(name)) for name, x in depth.items()}
        height = max(len(row) for row in rows.values())
        figure = Figure(figsize=(2.4 * (max(depth.values()) + 1), 1.2 * height + 0.4), layout="constrained")
        axes = figure.add_subplot()
        axes.set_axis_off()
        axes.set_xlim(-0.5, max(depth.values()) + 0.5)
        axes.set_ylim(-height / 2, height / 2)
        box = {"boxstyle": "round,pad=0.6", "facecolor": "#eef3f8", "edgecolor": "#40607f"}
        for name, (x, y) in at.items():
            axes.text(x, y, f"{name}\n{type(self.nodes[name]).__name__}", ha="center", va="center", bbox=box)
        for before, after in self.edges:
            arrow = {"arrowstyle": "->", "shrinkA": 34, "shrinkB": 34, "color": "#40607f"}
            axes.annotate("", at[after], at[before], arrowprops=arrow)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def __str__(self) -> str:
        return "\n".join(f"{before} → {after}" for before, after in self.edges)

    def _only(self, kind: type) -> str:
        return next((name for name, op in self.nodes.items() if isinstance(op, kind)), "")

    def _stage(self, name: str) -> str:
        return STAGES.get(type(self.nodes[name]), name)

    def _before(self, name: str) -> set[str]:
        """All nodes from which edges lead to one."""
        found: set[str] = set()
        waiting = {name}
        while waiting:
            waiting = {before for before, after in self.edges if after in waiting} - found
            found |= waiting
        return found

    def _scores(self, name: str) -> set[str]:
        """The nodes before one that score."""
        return {n for n in self._before(name) if isinstance(self.nodes[n], ScoreOp | RewardOp | CostOp)}

    def _check_scores(self) -> None:
        for name, op in self.nodes.items():
            if not isinstance(op, ScoreOp | RewardOp | CostOp):
                continue
            known = {self._stage(n) for n in self._scores(name)}
            for signal in read_signals(op.source, name):
                wanted = _parameters(signal.get("function"))
                for other in self.nodes:
                    if (stage := self._stage(other)) in wanted and stage not in known and other != name:
                        raise ConfigError(
                            f"node {name} needs {stage!r}, the score of {other}, which is not before it: "
                            f"add_edge({other!r}, {name!r})"
                        )


def _parameters(function: Any) -> set[str]:
    """The names of what a function takes, as far as it tells."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


class HybridExecutor(Trainer):
    """A run of a graph, on this host. What it can do beside `run` is told at Trainer."""

    def __init__(self, graph: HybridGraph, **arguments: Any) -> None:
        """arguments: what Trainer takes beside the models. Raises ConfigError where the graph or a setting is wrong.

        A ScoreOp with no edges from or to the reward is before it.
        """
        super().__init__(graph.config(), **arguments)
        self.graph = graph

    run = Trainer.train

"""Graphs of operations: what is refused, what config a graph is, and a run with a filter and a reward that learns."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from shared.errors import ConfigError
from stretto import CostOp, GenerateOp, HybridExecutor, HybridGraph, RewardOp, ScoreOp, UpdateOp


def is_safe(completion: str) -> float:
    return float(sum(map(ord, completion)) % 2)


def graph_of(*edges: str, **nodes: Any) -> HybridGraph:
    graph = HybridGraph()
    usual = {"generate": GenerateOp(), "reward": RewardOp("exact_match"), "update": UpdateOp()}
    for name, op in (usual | nodes).items():
        graph.add_node(name, op)
    for edge in edges:
        graph.add_edge(*edge.split(">"))
    return graph


USUAL = ("generate>reward", "reward>update")


@pytest.mark.parametrize(
    ("edges", "nodes", "words"),
    [
        ((), {}, "node reward is not reached from generate: add_edge('generate', 'reward')"),
        (("generate>reward", "generate>update"), {}, "node reward does not lead to update"),
        (
            (*USUAL, "generate>s", "s>s2", "s2>s", "s>update"),
            {"s": ScoreOp(is_safe), "s2": ScoreOp(is_safe)},
            "nodes wait for each other, ",
        ),
        ((*USUAL, "reward>generate"), {}, "nodes wait for each other, "),
        ((*USUAL, "generate>s"), {"s": ScoreOp(is_safe)}, "node s does not lead to update: add_edge('s', 'update')"),
        (
            (*USUAL, "generate>s", "s>update"),
            {"s": ScoreOp(lambda reward: reward)},
            "node s needs 'reward', the score of reward, which is not before it: add_edge('reward', 's')",
        ),
    ],
)
def test_a_graph_that_cannot_run_is_refused_with_the_node(edges, nodes, words):
    with pytest.raises(ConfigError) as refused:
        graph_of(*edges, **nodes).order()
    assert words in str(refused.value)


def test_nodes_and_edges_that_make_no_sense_are_refused():
    graph = graph_of(*USUAL)
    for name, op, words in (
        ("update", UpdateOp(), "there is a node update already"),
        ("again", UpdateOp(), "nodes update and again are both a UpdateOp; a graph has one"),
        ("learner", ScoreOp(is_safe), "'learner' cannot be the name of a stage"),
        ("My stage", ScoreOp(is_safe), "'My stage' cannot be the name of a stage"),
    ):
        with pytest.raises(ConfigError, match=words):
            graph.add_node(name, op)
    with pytest.raises(ConfigError, match="there is no node 'x'; there are generate, reward, update"):
        graph.add_edge("x", "update")
    with pytest.raises(ConfigError, match="the graph has no GenerateOp"):
        HybridGraph().order()


def test_edges_say_what_stages_come_after():
    graph = HybridGraph()
    graph.add_node("sample", GenerateOp("a/model", sampling={"max_tokens": 7}, settings={"replicas": 3}))
    graph.add_node("safety", ScoreOp(is_safe, at_least=0.5, settings={"replicas": 2}))
    graph.add_node("judge", RewardOp({"right": "exact_match", "short": ("length", -0.1)}))
    graph.add_node("harm", CostOp("tcp://127.0.0.1:9"))
    graph.add_node("audit", ScoreOp(lambda safety, reward: safety * reward))
    graph.add_node("train", UpdateOp({"name": "safe_rlhf", "threshold": 0.2}, settings={"lr": 1e-4}))
    for edge in ("sample>safety", "safety>judge", "safety>harm", "judge>audit", "audit>train", "harm>train"):
        graph.add_edge(*edge.split(">"))
    config = HybridExecutor(graph, steps=3).config
    assert {name: after for name, (_, after) in config.scoring.items()} == {
        "reward": ["safety"],
        "cost": ["safety"],
        "safety": [],
        "audit": ["safety", "reward"],
    }
    assert (config.model, config.sampling.max_tokens, config.rollout.replicas) == ("a/model", 7, 3)
    assert (config.stages[0].at_least, config.stages[0].replicas, config.steps) == (0.5, 2, 3)
    assert [(s.name, s.weight) for s in config.reward.signals] == [("right", 1.0), ("short", -0.1)]
    assert (config.algorithm.name, config.learner.lr) == ("safe_rlhf", 1e-4)
    assert str(graph).splitlines()[0] == "sample → safety"


def test_a_drawing_shows_every_node_and_edge(tmp_path):
    graph = graph_of("generate>safety", "safety>reward", "reward>update", safety=ScoreOp(is_safe))
    figure = graph.draw(tmp_path / "graph.png")
    (axes,) = figure.axes
    shown = {text.get_text().split("\n")[0] for text in axes.texts}
    assert shown >= set(graph.nodes) and len(axes.texts) == len(graph.nodes) + len(graph.edges)
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")


class Online:
    """A reward model of one parameter, which goes on learning the length of what it is asked about."""

    def __init__(self) -> None:
        self.mean, self.seen = 0.0, []

    def __call__(self, completion: str, safety: float) -> float:
        assert safety == 1.0
        self.seen.append(completion)
        error = len(completion) - self.mean
        self.mean += 0.1 * error
        return -abs(error)


def test_a_filter_guards_a_reward_that_learns_in_this_process(tiny_model, tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    monkeypatch.setenv("STRETTO_SHM", str(tmp_path / "shm"))
    online, threads = Online(), set()

    def safe(completion: str) -> float:
        threads.add(threading.current_thread().name)
        return is_safe(completion)

    graph = graph_of(
        "generate>safety",
        "safety>reward",
        "reward>update",
        generate=GenerateOp(str(tiny_model), sampling={"max_tokens": 4}),
        safety=ScoreOp(safe, at_least=0.5),
        reward=RewardOp(online),
        update=UpdateOp("grpo", settings={"lr": 1e-3}),
    )
    result = HybridExecutor(
        graph,
        data_provider=[f"{i}+1" for i in range(8)],
        steps=2,
        prompts_per_step=2,
        samples_per_prompt=4,
        folder=str(tmp_path),
        cores="shared",
    ).run(progress=False)
    assert result.stop_reason == "all 2 steps are done"
    assert online.seen and all(is_safe(completion) for completion in online.seen) and online.mean != 0
    assert threads == {"reward functions"}

"""The run config: what is refused and what the refusal says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config import RunConfig, dump_config, load_config, parse_config
from shared.errors import ConfigError


def tree(**changes: Any) -> dict[str, Any]:
    smallest: dict[str, Any] = {
        "model": "m",
        "prompts_per_step": 2,
        "samples_per_prompt": 4,
        "steps": 1,
        "data": {"train": "train.jsonl"},
        "reward": {"signals": [{"name": "exact", "function": "exact_match"}]},
    }
    return smallest | changes


def own_stage(name: str, signal: str = "s", **settings: Any) -> dict[str, Any]:
    return {"name": name, "signals": [{"name": signal, "function": "length"}], **settings}


def faults_of(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        parse_config(tree(**changes))
    first, *faults = str(refused.value).splitlines()
    assert first == "the config has errors:"
    return [fault.strip() for fault in faults]


def load(folder: Path, *overrides: str, **changes: Any) -> RunConfig:
    (folder / "run.yaml").write_text(yaml.safe_dump(tree(**changes)))
    return load_config(folder / "run.yaml", list(overrides))


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    assert faults_of(learner={"lrr": 1e-5}) == ["learner.lrr: unknown key; did you mean lr?"]
    assert faults_of(evaluation={"sampling": {"max_token": 8}}) == [
        "evaluation.sampling.max_token: unknown key; did you mean max_tokens?"
    ]


def test_an_unknown_key_unlike_any_is_refused_with_those_allowed_there() -> None:
    assert faults_of(checkpoint={"foo": 1}) == [
        "checkpoint.foo: unknown key; allowed here: every, keep_last, keep_every"
    ]


def test_a_wrong_item_of_a_list_is_the_only_fault_named() -> None:
    assert faults_of(reward={"signals": [{"function": "length"}]}) == ["reward.signals.0.name: Field required"]


def test_an_empty_list_of_signals_is_a_fault() -> None:
    (fault,) = faults_of(reward={"signals": []})
    assert fault.startswith("reward.signals: ")


def test_every_fault_is_named_at_once() -> None:
    assert len(faults_of(prompts_per_step=0, learner={"lr": -1}, rollout={"replicas": 0})) == 3


def test_the_path_of_a_fault_holds_keys_and_nothing_else() -> None:
    assert all(fault.startswith("cores: ") for fault in faults_of(cores="all"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": None}, "steps or epochs"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature is 0"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p"),
        ({"sampling": {"top_k": 50}}, "sampling.top_k"),
        ({"evaluation": {"metric": "exakt"}}, "evaluation.metric is 'exakt'; the signals are exact"),
        ({"max_staleness": 4096}, "admit 8194 groups, but broker.max_in_flight_groups is 4096"),
        (
            {"reward": {"signals": [{"name": "a", "function": "length"}, {"name": "a", "function": "length"}]}},
            "two signals have one name",
        ),
        ({"reward": {"signals": [{"name": "a"}]}}, "the signal a needs a function, a model or a server, and has none"),
        (
            {"reward": {"signals": [{"name": "a", "function": "length", "model": "m"}]}},
            "the signal a needs a function, a model or a server, and has function and model",
        ),
        (
            {"reward": {"signals": [{"name": "a", "function": "length", "dtype": "int8"}]}},
            "the signal a has a function, for which dtype means nothing",
        ),
        (
            {"reward": {"signals": [{"name": "a", "model": "m", "args": {"x": 1}}]}},
            "the signal a has a model, for which args means nothing",
        ),
        (
            {"reward": {"signals": [{"name": "a", "model": "m", "dtype": "int8", "backend": "vllm"}]}},
            "only hf makes weights int8",
        ),
        (
            {"reward": {"signals": [{"name": "a", "function": "length", "clip": [1, 1]}]}},
            "clip is [low, high], but 1 is not below 1",
        ),
        (
            {"cost": {"signals": [{"name": "exact", "function": "length"}]}},
            "reward, cost or stages share a signal exact",
        ),
        ({"stages": [own_stage("critic")]}, "there is a stage critic already"),
        ({"stages": [own_stage("a"), own_stage("a", signal="t")]}, "there is a stage a already"),
        (
            {"stages": [own_stage("a", after=["b"]), own_stage("b", signal="t")]},
            "a is after b, which is no stage before",
        ),
        ({"stages": [own_stage("a", signal="exact")]}, "reward, cost or stages share a signal exact"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], words: str) -> None:
    (fault,) = faults_of(**changes)
    assert words in fault


def test_stages_are_before_the_reward_unless_they_are_after_it() -> None:
    stages = [
        own_stage("late", "a", after=["reward"]),
        own_stage("later", "b", after=["late"]),
        own_stage("early", "c"),
    ]
    scoring = parse_config(tree(stages=stages)).scoring
    assert {name: after for name, (_, after) in scoring.items()} == {
        "reward": ["early"],
        "late": ["reward"],
        "later": ["late"],
        "early": [],
    }


def test_evaluation_may_cut_the_distribution_and_is_greedy_by_default() -> None:
    assert parse_config(tree()).eval_sampling.temperature == 0
    own = parse_config(tree(evaluation={"sampling": {"temperature": 0.6, "top_p": 0.9}}))
    assert own.eval_sampling.top_p == 0.9


def test_an_algorithm_may_be_given_by_its_name_alone() -> None:
    assert parse_config(tree(algorithm="grpo")).algorithm == parse_config(tree(algorithm={"name": "grpo"})).algorithm


def test_sizes_of_a_step_follow_from_prompts_and_samples() -> None:
    config = parse_config(tree(max_staleness=2))
    assert (config.samples_per_step, config.in_flight_groups) == (8, 6)


def test_the_dumped_config_gives_the_same_config_again() -> None:
    signals = [{"name": "exact", "function": "length", "clip": [0, 1]}, {"name": "judge", "model": "m", "label": 1}]
    cost = {"signals": [{"name": "safety", "model": "m", "dtype": "int8"}]}
    changes = {"reward": {"signals": signals}, "cost": cost, "cores": {"learner": [0, 1]}}
    config = parse_config(tree(**changes, sampling={"stop": ["\n"]}))
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_overrides_reach_new_and_old_keys_and_items_of_lists(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "learner.lr=1e-5",
        "prompts_per_step=3",
        "reward.signals.0.args.ignore_case=true",
        "reward.signals.0.weight=0.5",
        "sampling.stop=[a, b]",
    )
    assert config.learner.lr == 1e-5
    assert config.prompts_per_step == 3
    assert config.reward.signals[0].args == {"ignore_case": True}
    assert config.reward.signals[0].weight == 0.5
    assert config.sampling.stop == ("a", "b")


def test_an_override_fills_a_section_that_is_left_empty(tmp_path: Path) -> None:
    assert load(tmp_path, "learner.lr=0.1", learner=None).learner.lr == 0.1


@pytest.mark.parametrize(
    "override",
    [
        "learner.lr",  # no value
        "=3",  # no key
        "learner.lr=[",  # no YAML
        "algorithm.beta=0.1",  # a text has no keys
        "reward.signals.1.weight=2",  # a list has no second item
        "reward.signals.exact.weight=2",  # nor items by name
        "steps.x.y=2",  # a number has no keys
    ],
)
def test_an_override_that_leads_nowhere_is_refused_by_its_text(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, override, algorithm="grpo")
    assert repr(override) in str(refused.value)


def test_a_config_that_cannot_be_read_is_refused_with_its_path(tmp_path: Path) -> None:
    wrong = {"missing.yaml": None, "broken.yaml": "a: [", "list.yaml": "- a", "binary.yaml": "\x00"}
    for name, content in wrong.items():
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=name):
            load_config(tmp_path / name)

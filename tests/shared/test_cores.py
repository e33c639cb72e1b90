"""Which cores a service gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cores import YIELDING, niceness, plan_cores, plan_gpus, process_environment
from shared.errors import ConfigError

INSTANCES = ["broker", "broadcaster-0", "rollout-0", "rollout-1", "reward-0", "learner-0"]


def test_the_rollouts_share_out_the_lower_half_and_the_learner_may_use_every_core() -> None:
    plan = plan_cores("auto", INSTANCES, [0, 1, 2, 3, 4, 5, 6, 7])
    assert (plan["rollout-0"], plan["rollout-1"]) == ((0, 1), (2, 3))
    assert plan["learner-0"] == plan["broker"] == plan["reward-0"] == (0, 1, 2, 3, 4, 5, 6, 7)


def test_on_two_cores_the_rollouts_have_one() -> None:
    plan = plan_cores("auto", INSTANCES, [0, 1])
    assert (plan["learner-0"], plan["rollout-0"], plan["rollout-1"]) == ((0, 1), (0,), (0,))


def test_rollouts_yield_where_they_share_cores_with_the_learner_and_nobody_else_does() -> None:
    shared, apart = plan_cores("auto", INSTANCES, [0, 1]), {"rollout-0": (0,), "learner-0": (1,)}
    assert {name for name in INSTANCES if niceness(name, shared) == YIELDING} == {"rollout-0", "rollout-1"}
    assert [niceness(name, apart) for name in apart] == [0, 0]


@given(st.integers(2, 40), st.integers(1, 12))
def test_every_instance_has_cores_and_the_learner_always_some_without_rollouts(cores: int, rollouts: int) -> None:
    names = [f"rollout-{i}" for i in range(rollouts)]
    plan = plan_cores("auto", [*names, "learner-0"], list(range(cores)))
    assert all(plan[name] for name in plan)
    assert set(plan["learner-0"]) > {core for name in names for core in plan[name]}


@pytest.mark.parametrize("setting", ["auto", "shared"])
def test_one_core_is_for_everybody(setting: str) -> None:
    assert set(plan_cores(setting, INSTANCES, [5]).values()) == {(5,)}


def test_shared_lets_everybody_use_every_core() -> None:
    assert set(plan_cores("shared", INSTANCES, [0, 1, 2]).values()) == {(0, 1, 2)}


def test_a_map_names_services_or_instances_and_leaves_the_others_free() -> None:
    plan = plan_cores({"rollout": (0, 1), "learner-0": (3,)}, INSTANCES, [0, 1, 2, 3])
    assert (plan["rollout-0"], plan["rollout-1"], plan["learner-0"]) == ((0,), (1,), (3,))
    assert plan["broker"] == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"lerner": (0,)}, r"cores\.lerner: there is no such service"),
        ({"learner": (0, 9)}, r"cores\.learner names \[9\]; the cores here are \[0\]"),
        ({"learner": ()}, r"cores\.learner names no core"),
    ],
)
def test_a_map_of_what_is_not_there_is_refused_on_one_core_too(setting: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_cores(setting, INSTANCES, [0])


def test_busy_services_run_a_thread_a_core_and_the_others_one() -> None:
    assert process_environment("learner", (4, 5, 6))["OMP_NUM_THREADS"] == "3"
    assert process_environment("reward", (0, 1, 2, 3))["OMP_NUM_THREADS"] == "1"


def test_waiting_threads_sleep() -> None:
    environment = process_environment("rollout", (0,))
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert environment["GOMP_SPINCOUNT"] == environment["KMP_BLOCKTIME"] == "0"


def test_gpus_are_shared_out_among_the_processes_of_a_service() -> None:
    plan = plan_gpus({"rollout": (0, 1, 2, 3), "learner": (4,)}, INSTANCES)
    assert plan == {"rollout-0": (0, 1), "rollout-1": (2, 3), "learner-0": (4,)}
    assert process_environment("rollout", (0,), plan["rollout-1"])["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in process_environment("reward", (0,), plan.get("reward-0"))


@pytest.mark.parametrize(
    ("setting", "words"),
    [({"lerner": (0,)}, r"gpus\.lerner: there is no such service"), ({"learner": ()}, r"gpus\.learner names no GPU")],
)
def test_gpus_for_nobody_and_no_gpus_are_refused(setting: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_gpus(setting, INSTANCES)

"""Which cores and GPUs each service gets, who yields to whom there, and the environment that keeps its threads there.

Two OpenMP threads of one service beside a second busy service were seen to make a learner's step seven times slower,
because threads spin while they wait: so cores are given out, and waiting threads sleep.
"""

from __future__ import annotations

import os

from shared.errors import ConfigError

BUSY = ("learner", "rollout", "reference", "critic", "cost_critic")
YIELDING = 10
"""Niceness of a rollout on cores of the learner: where both have work, the learner gets nine tenths of the core."""


def available_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def plan_cores(
    setting: str | dict[str, tuple[int, ...]], instances: list[str], cores: list[int]
) -> dict[str, tuple[int, ...]]:
    """The cores of each instance (`rollout-0`, `learner-0`, …).

    auto: the rollouts share out the lower half of the cores, the learner and everything else may use any core. With
    that the learner takes over what the rollouts leave idle while they wait for it, which was seen to train 1.5 times
    as many samples a second on two cores as one core each. shared: everything may use any core. A map gives cores by
    service (shared out among its instances) or by instance.
    Raises ConfigError for a core or a service that is not there.
    """
    everywhere = tuple(cores)
    plan = dict.fromkeys(instances, everywhere)
    if isinstance(setting, dict):
        return plan | _as_told(setting, instances, cores)
    if setting == "shared" or len(cores) < 2:
        return plan
    return plan | _share_out(cores[: len(cores) // 2], [name for name in instances if _service(name) == "rollout"])


def plan_gpus(setting: dict[str, tuple[int, ...]], instances: list[str]) -> dict[str, tuple[int, ...]]:
    """The GPUs of the instances that a map by service or instance names; the others may use all.

    Raises ConfigError for a service that is not there or is given none.
    """
    plan: dict[str, tuple[int, ...]] = {}
    for name, wanted in setting.items():
        if not wanted:
            raise ConfigError(f"gpus.{name} names no GPU")
        plan |= _share_out(list(wanted), _members("gpus", name, instances))
    return plan


def niceness(instance: str, plan: dict[str, tuple[int, ...]]) -> int:
    """0, or how far an instance steps back (see nice(2)): rollouts do where they share cores with the learner."""
    shares = any(set(plan[instance]) & set(cores) for name, cores in plan.items() if _service(name) == "learner")
    return YIELDING if _service(instance) == "rollout" and shares else 0


def process_environment(
    service: str, cores: tuple[int, ...], gpus: tuple[int, ...] | None = None, processes: int = 1
) -> dict[str, str]:
    """Environment variables for a process on these cores: as many threads, which sleep while they wait.

    gpus: those that it may use; None: any. processes: how many share the cores.
    """
    threads = str(max(len(cores) // processes, 1) if service in BUSY else 1)
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    return visible | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _service(instance: str) -> str:
    return instance.rpartition("-")[0] or instance


def _as_told(setting: dict[str, tuple[int, ...]], instances: list[str], cores: list[int]) -> dict[str, tuple[int, ...]]:
    plan: dict[str, tuple[int, ...]] = {}
    for name, wanted in setting.items():
        missing = sorted(set(wanted) - set(cores))
        if missing or not wanted:
            raise ConfigError(f"cores.{name} names {missing or 'no core'}; the cores here are {cores}")
        plan |= _share_out(list(wanted), _members("cores", name, instances))
    return plan


def _members(setting: str, name: str, instances: list[str]) -> list[str]:
    """The instances that a name of a service or an instance means."""
    members = [i for i in instances if name in (i, _service(i))]
    if not members:
        raise ConfigError(f"{setting}.{name}: there is no such service; there are {', '.join(instances)}")
    return members


def _share_out(cores: list[int], instances: list[str]) -> dict[str, tuple[int, ...]]:
    """Equal parts of the cores; where there are more instances than cores, each gets one and some share."""
    if len(instances) > len(cores):
        return {name: (cores[i % len(cores)],) for i, name in enumerate(instances)}
    bounds = [i * len(cores) // max(len(instances), 1) for i in range(len(instances) + 1)]
    return {name: tuple(cores[bounds[i] : bounds[i + 1]]) for i, name in enumerate(instances)}

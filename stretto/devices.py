"""Which GPUs and cores the parts of a run get, declared by role: a `device_map` becomes the config's own settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from shared.config import Section
from shared.cores import available_cores
from shared.errors import ConfigError

ROLES = {
    "actor_generate": "rollout",
    "policy_update": "learner",
    "reward_eval": "reward",
    "cost_eval": "cost",
    "reference_eval": "reference",
    "critic_update": "critic",
    "cost_critic_update": "cost_critic",
}
"""Roles, and the services that fill them. A service's name is a role, too, and so is `actor`, by its backend."""
BACKENDS = {"rollout": ("vllm",), "learner": ("fsdp",), "reward": ("hf", "vllm"), "cost": ("hf", "vllm")}
ANY_BACKEND = ("hf",)
Numbers = tuple[Annotated[int, Field(ge=0)], ...]


class ResourcePool(Section):
    """GPUs and cores of this host, by number, and what computes there."""

    gpus: Numbers = ()
    cores: Numbers = ()
    backend: str | None = None

    @model_validator(mode="after")
    def _no_number_twice(self) -> Self:
        for kind, numbers in (("gpus", self.gpus), ("cores", self.cores)):
            if len(set(numbers)) < len(numbers):
                raise ValueError(f"a number is twice in its {kind}")
        return self

    @classmethod
    def here(cls) -> Self:
        """All GPUs of this host, and the cores that this process may use."""
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        return cls(gpus=tuple(range(gpus)), cores=tuple(available_cores()))

    def split(self, **counts: int) -> dict[str, ResourcePool]:
        """A device map that gives each role so many of the GPUs. Raises ConfigError where there are too few."""
        if sum(counts.values()) > len(self.gpus) or min(counts.values()) < 1:
            wanted = ", ".join(f"{count} for {role}" for role, count in counts.items())
            raise ConfigError(f"a pool of {len(self.gpus)} GPUs cannot be split into {wanted}")
        left = iter(self.gpus)
        return {role: ResourcePool(gpus=tuple(next(left) for _ in range(n))) for role, n in counts.items()}


def place(device_map: Mapping[str, Any], tree: dict[str, Any]) -> None:
    """Put what a device map says into a config's tree: `gpus`, `cores`, numbers of processes, engine and backends.

    Raises ConfigError where pools overlap or cannot be shared out among the processes of a service.
    """
    owners: dict[tuple[str, int], str] = {}
    roles: dict[str, str] = {}
    for role, value in device_map.items():
        pool = _pool(role, value)
        service = ROLES.get(role, role)
        if role == "actor":
            service = {"vllm": "rollout", "fsdp": "learner"}.get(pool.backend or "", role)
        if service not in ROLES.values():
            raise ConfigError(
                f"device_map.{role}: the roles are {', '.join(ROLES)}, and actor with backend fsdp or vllm"
            )
        if (other := roles.setdefault(service, role)) != role:
            raise ConfigError(f"device_map: {other} and {role} are one role")
        backends = BACKENDS.get(service, ANY_BACKEND)
        if pool.backend not in (None, *backends):
            raise ConfigError(f"device_map.{role}: its backend is {' or '.join(backends)}, not {pool.backend}")
        section = tree.setdefault(service, {})
        for signal in section.get("signals", ()):
            if "model" in signal and pool.backend is not None:
                signal["backend"] = pool.backend
        for kind, numbers in (("gpus", pool.gpus), ("cores", pool.cores)):
            for number in numbers:
                if (owner := owners.setdefault((kind, number), role)) != role:
                    raise ConfigError(f"device_map: {owner} and {role} both have number {number} of the {kind}")
            if numbers:
                given = tree.get(kind)
                tree[kind] = (given if isinstance(given, dict) else {}) | {service: numbers}
        if pool.gpus:
            _share_out(role, service, len(pool.gpus), section)


def _pool(role: str, value: Any) -> ResourcePool:
    try:
        return ResourcePool.model_validate(value if isinstance(value, Mapping | ResourcePool) else {"gpus": value})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"device_map.{role} is a list of GPUs, a ResourcePool, or a map of gpus, cores and backend; in {value!r}: "
            f"{reason}"
        ) from None


def _share_out(role: str, service: str, gpus: int, section: dict[str, Any]) -> None:
    """As many processes as there are GPUs, unless their number is given; vLLM alone uses several a process."""
    count, each = "ranks" if service == "learner" else "replicas", 1
    if service == "rollout":
        if section.setdefault("engine", "vllm") != "vllm":
            raise ConfigError(f"device_map.{role} gives GPUs to rollout.engine {section['engine']}, which has no use")
        split = section.setdefault("vllm", {})
        each = math.prod(split.get(f"{how}_parallel", 1) for how in ("tensor", "pipeline", "data"))
        if each == 1 and count in section:
            each = split["tensor_parallel"] = max(gpus // section[count], 1)
    processes = 1 if "critic" in service else section.setdefault(count, gpus // each)
    if processes * each != gpus:
        raise ConfigError(f"device_map.{role}: {gpus} GPUs cannot be shared out, {each} each, to {processes} processes")

"""The gate: how many training groups the ledger may admit, and how old the weights may be that generate them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from shared.config import RunConfig


@dataclass(frozen=True, slots=True)
class Policy:
    """The numbers that the ledger decides by; see the fields of the same names in shared/config.py."""

    prompts_per_step: int
    total_steps: int
    max_staleness: int
    on_stale: str
    max_attempts: int
    dead_letter_limit: int
    max_in_flight_groups: int
    lease_s: float

    @classmethod
    def of(cls, config: RunConfig, total_steps: int) -> Policy:
        """The policy of a run."""
        return cls(
            prompts_per_step=config.prompts_per_step,
            total_steps=total_steps,
            max_staleness=config.max_staleness,
            on_stale=config.on_stale,
            max_attempts=config.broker.max_attempts,
            dead_letter_limit=config.broker.dead_letter_limit,
            max_in_flight_groups=config.broker.max_in_flight_groups,
            lease_s=config.broker.lease_s,
        )


class Gate:
    """Slots: one for each group that will ever be trained, `prompts_per_step` a version, in their order.

    A group takes the lowest free slot. One that is dropped or dies gives its slot back, so another takes its place.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._next = 0
        self._free: list[int] = []

    def room(self, version: int, in_flight: int) -> int:
        """How many groups may be admitted at a version, `in_flight` being in memory.

        At most (version + max_staleness + 1) · prompts_per_step are ever admitted, dropped and dead ones not counted,
        never more than the run will train, and never more in flight than memory is meant for.
        """
        steps = min(version + self._policy.max_staleness + 1, self._policy.total_steps)
        open_slots = steps * self._policy.prompts_per_step - self._next + len(self._free)
        return max(0, min(open_slots, self._policy.max_in_flight_groups - in_flight))

    def take(self) -> int:
        """A slot; the caller has made sure that there is room."""
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, slot: int) -> None:
        """The group that had the slot will not be trained."""
        heapq.heappush(self._free, slot)

    def min_version(self, slot: int, version: int) -> int:
        """The oldest policy version that may generate a slot's group, so that it is not too stale when its turn comes.

        A slot that was given back is trained at `version` at the earliest, however early its first turn was.
        """
        turn = max(slot // self._policy.prompts_per_step, version)
        return max(0, turn - self._policy.max_staleness)

    def start_at(self, version: int) -> None:
        """All slots before a version's were used in the run that goes on."""
        self._next = version * self._policy.prompts_per_step

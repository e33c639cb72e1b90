"""The gate: how many training groups the ledger may admit, how old they may be, and when an update has to wait."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.config import RunConfig


@dataclass(frozen=True, slots=True)
class Policy:
    """The numbers that the ledger decides by; see the fields of the same names in shared/config.py."""

    prompts_per_step: int
    total_steps: int
    max_staleness: int
    on_stale: str
    replace_equal: float
    max_attempts: int
    dead_letter_limit: int
    max_in_flight_groups: int
    lease_s: float

    @classmethod
    def of(cls, config: RunConfig, total_steps: int, *, replace_equal: float = 0.0) -> Policy:
        """The policy of a run. replace_equal: where the config leaves it open."""
        return cls(
            prompts_per_step=config.prompts_per_step,
            total_steps=total_steps,
            max_staleness=config.max_staleness,
            on_stale=config.on_stale,
            replace_equal=replace_equal if config.replace_equal is None else config.replace_equal,
            max_attempts=config.broker.max_attempts,
            dead_letter_limit=config.broker.dead_letter_limit,
            max_in_flight_groups=config.broker.max_in_flight_groups,
            lease_s=config.broker.lease_s,
        )

    def room(self, version: int, training: int, in_flight: int) -> int:
        """How many training groups may be admitted at a version, with so many of them in flight, and of all lanes.

        At most (version + max_staleness + 1) · prompts_per_step are ever admitted, dropped and dead ones not counted,
        never more than the run will train, and never more in flight than memory is meant for.
        """
        steps = min(version + self.max_staleness + 1, self.total_steps) - version
        return max(0, min(steps * self.prompts_per_step - training, self.max_in_flight_groups - in_flight))

    def min_version(self, version: int, training: int) -> int:
        """The oldest weights that may generate the next group, so that it is not too stale when its turn comes.

        Its turn is the update after those that the `training` groups in flight before it are enough for.
        """
        return max(0, version + training // self.prompts_per_step - self.max_staleness)

    def in_time(self, version: int, oldest_versions: Iterable[int]) -> bool:
        """Whether the groups that an update of `version` leaves behind can all be trained before they are too stale.

        oldest_versions: of each group, the oldest that it has tokens of or may get. They are trained oldest first.
        """
        return all(
            version + 1 + place // self.prompts_per_step - oldest <= self.max_staleness
            for place, oldest in enumerate(sorted(oldest_versions))
        )

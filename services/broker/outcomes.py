"""What may happen to a group in the ledger beside going on to its next stage. The server acts on it."""

from __future__ import annotations

from dataclasses import dataclass

from shared.group import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Dead:
    """A group became a dead letter: it failed too often at one stage. errors: the text of each failure."""

    group: TrajectoryGroup
    stage: str
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group left without being trained; its prompt goes back to the source."""

    group: TrajectoryGroup
    reason: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """A group of equal rewards left without being trained; a group of the next prompt takes its place."""

    group: TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation group has all its columns. scheduled: the version that it was made for."""

    group: TrajectoryGroup
    scheduled: int


@dataclass(frozen=True, slots=True)
class Returned:
    """A lease was lost and the group went back to its queue."""

    group_id: str
    stage: str
    holder: str
    reason: str


@dataclass(frozen=True, slots=True)
class SystematicFault:
    """So many groups died in a row at one stage that the run must stop."""

    stage: str
    deaths: int
    last_error: str


Outcome = Dead | Dropped | Replaced | Evaluated | Returned | SystematicFault

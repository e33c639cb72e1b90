"""Who reads and who writes the snapshot slots. A pure state machine; time is an argument."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from shared.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot in a slot. Versions are ordered by (lineage, version)."""

    slot: int
    lineage: int
    version: int
    manifest: dict[str, Any]

    @property
    def id(self) -> tuple[int, int]:
        """What orders snapshots: (lineage, version)."""
        return self.lineage, self.version


@dataclass(slots=True)
class Reader:
    """A rollout: the slot it reads, and the one that is held for it since it was offered."""

    reading: int | None = None
    offered: int | None = None

    def holds(self, slot: int) -> bool:
        """Whether the slot must not be written because of this reader."""
        return slot in (self.reading, self.offered)


@dataclass(slots=True)
class Ring:
    """The slots of one snapshot file, `path`, which is another one after the learner has started again.

    A slot may be written when no reader holds it and it is not the newest snapshot, on which the learner itself
    computes. Only the newest snapshot is ever offered: one that nobody took is simply replaced.
    """

    slots: int
    deadline_s: float
    path: str | None = None
    newest: Snapshot | None = None
    _published: dict[int, Snapshot] = field(default_factory=dict)
    _readers: dict[str, Reader] = field(default_factory=dict)
    _evicted: set[str] = field(default_factory=set)
    _writing: int | None = None
    _blocked_since: float | None = None

    def use(self, path: str, *, is_new: bool) -> None:
        """The learner writes to this file from now on. is_new: nothing in it was ever offered.

        Raises ProtocolError `unknown_lease` where something was, by a broadcaster before this one: who reads it is not
        known here.
        """
        if path == self.path:
            return
        if not is_new:
            raise ProtocolError("unknown_lease", "this broadcaster has started since: write to a new file")
        self.path, self.newest, self._writing = path, None, None
        self._published.clear()
        for reader in self._readers.values():
            reader.reading = reader.offered = None

    def acquire(self, now: float) -> int | None:
        """A slot for the learner to write, or None while all are read."""
        slot = self._free_slot()
        if slot is None:
            self._blocked_since = now if self._blocked_since is None else self._blocked_since
        else:
            self._blocked_since, self._writing = None, slot
            self._published.pop(slot, None)
        return slot

    def evict(self, now: float, gone: Collection[str] = ()) -> list[str]:
        """Who loses its slot: where the learner waits for one, those who are gone; after `deadline_s` everybody."""
        if self._blocked_since is None:
            return []
        is_over = now - self._blocked_since >= self.deadline_s
        evicted = [instance for instance in self.blockers() if is_over or instance in gone]
        for instance in evicted:
            del self._readers[instance]
        self._evicted.update(evicted)
        return evicted

    def _free_slot(self) -> int | None:
        """The one with the oldest snapshot, since deltas start from the others."""
        newest = self.newest.slot if self.newest else None
        free = [
            slot
            for slot in range(self.slots)
            if slot != newest and not any(reader.holds(slot) for reader in self._readers.values())
        ]
        return min(free, key=self._age, default=None)

    def _age(self, slot: int) -> tuple[int, int]:
        snapshot = self._published.get(slot)
        return (-1, -1) if snapshot is None else snapshot.id

    def find(self, lineage: int, version: int) -> Snapshot | None:
        """The snapshot of a version, while no slot was acquired over it. Nothing holds it."""
        found = (s for s in self._published.values() if s.id == (lineage, version))
        return next(found, None)

    def offered(self, instance: str, lineage: int, version: int) -> Snapshot | None:
        """The snapshot of a version, if it is held for a rollout."""
        reader, snapshot = self._readers.get(instance), self.find(lineage, version)
        return snapshot if reader and snapshot and reader.offered == snapshot.slot else None

    def blockers(self) -> list[str]:
        """Readers that hold a snapshot other than the newest."""
        newest = self.newest.slot if self.newest else None
        return [
            instance
            for instance, reader in self._readers.items()
            if any(slot is not None and slot != newest for slot in (reader.reading, reader.offered))
        ]

    def publish(self, path: str, snapshot: Snapshot) -> None:
        """A snapshot is the newest. Raises ProtocolError `unknown_lease` where its slot was not acquired."""
        if path != self.path or snapshot.slot != self._writing:
            raise ProtocolError("unknown_lease", f"slot {snapshot.slot} was not acquired")
        self.newest, self._writing = snapshot, None
        self._published[snapshot.slot] = snapshot

    def follow(self, instance: str, path: str | None, slot: int | None, lineage: int, version: int) -> Snapshot | None:
        """A rollout reads `slot` of a file and nothing else; returns the newest snapshot, held for it, if it is newer.

        A rollout that reads nothing yet has just started. Raises ProtocolError `unknown_lease` where it was too slow
        and its slot was taken away.
        """
        if slot is None:
            self._evicted.discard(instance)
        elif instance in self._evicted:
            raise ProtocolError(
                "unknown_lease", f"{instance} kept the learner waiting for slot {slot} and lost it: restart"
            )
        self._readers[instance] = Reader(reading=slot if path == self.path else None)
        return self.offer(instance, lineage, version)

    def offer(self, instance: str, lineage: int, version: int) -> Snapshot | None:
        """The newest snapshot, held for a rollout from now on; None where it is not newer, or the rollout is gone."""
        reader = self._readers.get(instance)
        if reader is None or self.newest is None or self.newest.id <= (lineage, version):
            return None
        reader.offered = self.newest.slot
        return self.newest

    def release(self, instance: str) -> None:
        """What was offered to a rollout need not be held any more: it has its own copy, or is not there to take it."""
        if reader := self._readers.get(instance):
            reader.offered = None

    def leave(self, instance: str) -> None:
        """A rollout is gone."""
        self._readers.pop(instance, None)
        self._evicted.discard(instance)

"""The ledger: which groups exist, who works on them, and what may be admitted. A pure state machine.

No sockets, files or clock: time (`now`, seconds) comes in as an argument, and what happened goes out as outcomes. The
server calls it; every change of state passes through `admit`, `lease`, `complete`, `fail`, `release`, `expire`,
`commit`, `restore` and `rewind`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from services.broker.columns import check_columns
from services.broker.gate import Policy
from services.broker.outcomes import Dead, Dropped, Evaluated, Outcome, Replaced, Returned, SystematicFault
from shared.errors import ProtocolError
from shared.graph import Stage
from shared.group import Columns, Lane, Prompt, TrajectoryGroup

MAX_ERROR_CHARACTERS = 2000
"""An error text is cut to this length: dead letters are kept in memory and travel in the status."""


@dataclass(slots=True)
class Work:
    """One group at one stage. lease_id is None while nobody works on it.

    restored: the broker was restarted meanwhile; somebody may still work on it with a lease from before.
    """

    restored: bool = False
    attempt: int = 1
    lease_id: str | None = None
    holder: str = ""
    deadline: float = 0.0
    errors: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Entry:
    """A group in the ledger, and its work at the stages that are ready and not done.

    number: order of admission; admitted_at: version at that time, which is the one an evaluation group is for.
    turn: version and place in its batch, where an update had consumed it before the run was rewound.
    written: up to where the journal must be flushed to hold the group as it is.
    """

    group: TrajectoryGroup
    number: int
    admitted_at: int
    turn: tuple[int, int] | None = None
    written: int = 0
    work: dict[str, Work] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease that was given."""

    lease_id: str
    attempt: int
    entry: Entry


class Ledger:
    """All groups of a run.

    version: updates that were committed; lineage: how often the learner began anew; life: how often the broker did.
    """

    def __init__(self, stages: Iterable[Stage], policy: Policy) -> None:
        """stages: in an order in which they can run, the learner's last."""
        *self._middle, self._last = stages
        self._stages = {stage.name: stage for stage in (*self._middle, self._last)}
        self.policy = policy
        self.version = 0
        self.lineage = 0
        self.life = 0
        self._last_batch: list[str] = []
        self._entries: dict[str, Entry] = {}
        self._in_flight: Counter[Lane] = Counter()
        self._queues: dict[str, dict[str, Entry]] = {name: {} for name in self._stages}
        self._leases: dict[str, tuple[str, str]] = {}
        self._next_number = 0
        self._deaths_in_row: Counter[str] = Counter()
        self._replaced_since_commit = 0
        self._counts: dict[Lane, Counter[str]] = {"train": Counter(), "eval": Counter()}

    # Admission

    @property
    def is_new(self) -> bool:
        """Whether nothing was ever admitted."""
        return self._next_number == 0

    def entry(self, group_id: str) -> Entry | None:
        """A group in flight; None for any other."""
        return self._entries.get(group_id)

    def room(self) -> int:
        """How many training groups the gate admits now."""
        return self.policy.room(self.version, self._in_flight["train"], len(self._entries))

    def admit(self, lane: Lane, prompt: Prompt) -> Entry:
        """A new group for a prompt. The caller has made sure that there is `room` for a training group."""
        number = self._next_number
        self._next_number += 1
        min_version = self.version
        if lane == "train":
            min_version = self.policy.min_version(self.version, self._in_flight["train"])
        group = TrajectoryGroup(f"g{number:08d}", lane, prompt, min_version)
        self._counts[lane]["admitted"] += 1
        return self._enter(Entry(group, number, self.version))

    # Leases

    def lease(
        self,
        stage: str,
        holder: str,
        now: float,
        *,
        max_groups: int,
        min_groups: int = 1,
        version: int = 0,
        max_samples: int | None = None,
        samples: dict[Lane, int] | None = None,
    ) -> list[Grant]:
        """Lease up to `max_groups` groups that are ready for a stage; none where there are less than `min_groups`.

        version: of the weights that a rollout holds. max_samples: bound of the samples of all; samples: those that a
        group of each lane makes. Oldest admitted first; the learner gets the oldest policy versions first.
        """
        if stage == self._last.name:
            chosen = self._batch(min_groups, max_groups)
        else:
            chosen = self._oldest(stage, version, max_groups, max_samples, samples)
        return [self._grant(entry, stage, holder, now) for entry in chosen]

    def _oldest(
        self, stage: str, version: int, max_groups: int, max_samples: int | None, samples: dict[Lane, int] | None
    ) -> list[Entry]:
        chosen: list[Entry] = []
        room = max_samples
        for entry in sorted(self._queues[stage].values(), key=self._order):
            if len(chosen) == max_groups:
                break
            if stage == self._middle[0].name and version < entry.group.min_version:
                continue
            if room is not None and samples is not None:
                if samples[entry.group.lane] > room:
                    break
                room -= samples[entry.group.lane]
            chosen.append(entry)
        return chosen

    def _order(self, entry: Entry) -> tuple[int, int]:
        """Training goes before evaluation while the evaluated version is the newest; version 0 is evaluated first."""
        evaluation = entry.group.lane == "eval"
        late = entry.admitted_at < self.version or entry.admitted_at == 0
        return (0 if evaluation and late else 2 if evaluation else 1, entry.number)

    def _batch(self, min_groups: int, max_groups: int) -> list[Entry]:
        """Groups for the next update: those that it had before a rewind, or else oldest policy versions first."""
        queue = self._queues[self._last.name].values()
        again = [entry for entry in queue if entry.turn is not None and entry.turn[0] == self.version + 1]
        if again:
            return sorted(again, key=lambda entry: entry.turn or (0, 0))
        if len(queue) < min_groups:
            return []
        chosen = sorted(queue, key=lambda entry: (entry.group.oldest_version(), entry.number))[:max_groups]
        if self.policy.on_stale == "wait" and not self._leaves_in_time(chosen):
            return []
        return chosen

    def _leaves_in_time(self, chosen: list[Entry]) -> bool:
        """Whether all training groups that are not chosen can still be trained before they are too stale."""
        numbers = {entry.number for entry in chosen}
        left = [e for e in self._entries.values() if e.group.lane == "train" and e.number not in numbers]
        return self.policy.in_time(self.version, (entry.group.oldest_version() for entry in left))

    def _grant(self, entry: Entry, stage: str, holder: str, now: float) -> Grant:
        work = entry.work[stage]
        del self._queues[stage][entry.group.group_id]
        work.lease_id = f"{entry.group.group_id}/{stage}/{self.life}.{work.attempt}"
        work.holder, work.deadline = holder, now + self.policy.lease_s
        self._leases[work.lease_id] = (entry.group.group_id, stage)
        return Grant(work.lease_id, work.attempt, entry)

    def extend(self, holder: str, now: float) -> None:
        """The holder gave a sign of life: its leases run anew."""
        for group_id, stage in self._leases.values():
            work = self._entries[group_id].work[stage]
            if work.holder == holder:
                work.deadline = now + self.policy.lease_s

    # Outcomes

    def complete(self, group_id: str, lease_id: str, columns: Columns) -> list[Outcome]:
        """Add the columns of a stage; the first completion of a group at a stage wins, whatever its attempt.

        Raises ProtocolError `unknown_lease` where the stage is done or the group is gone, `bad_column` where the
        columns are not those that the stage provides.
        """
        entry, stage, work = self._leased(group_id, lease_id)
        provides = self._stages[stage].provides
        if not provides:
            raise ProtocolError("unknown_lease", f"groups at the stage {stage} are consumed by a commit")
        if set(columns) != provides:
            difference = ", ".join(sorted(provides ^ set(columns)))
            raise ProtocolError("bad_column", f"stage {stage} provides other columns (differing in {difference})")
        check_columns(entry.group, columns)
        self._close(entry, stage, work)
        entry.group.columns |= columns
        self._deaths_in_row[stage] = 0
        self._open_stages(entry)
        if entry.group.lane == "eval" and not entry.work:
            self._remove(entry, "consumed")
            return [Evaluated(entry.group, entry.admitted_at)]
        if "rewards" in columns and self._is_to_be_replaced(entry.group):
            self._remove(entry, "dropped: equal rewards")
            self._replaced_since_commit += 1
            return [Replaced(entry.group), *self._drop_stale()]
        return self._drop_stale()

    def _is_to_be_replaced(self, group: TrajectoryGroup) -> bool:
        limit = self.policy.replace_equal * self.policy.prompts_per_step
        return self._replaced_since_commit < limit and group.has_equal_rewards()

    def fail(self, group_id: str, lease_id: str, error: str, *, retry: bool) -> list[Outcome]:
        """A stage could not process a group. A report about a lease that is over changes nothing.

        Raises ProtocolError `unknown_lease` where the stage is done or the group is gone.
        """
        entry, stage, work = self._leased(group_id, lease_id)
        return self._failed(entry, stage, work, error, retry=retry) if work.lease_id == lease_id else []

    def expire(self, now: float) -> list[Outcome]:
        """Take back all leases whose deadline has passed."""
        over = [
            (group_id, stage)
            for group_id, stage in self._leases.values()
            if self._entries[group_id].work[stage].deadline <= now
        ]
        return self._take_back(over, f"no sign of life for {self.policy.lease_s:g} s")

    def release(self, holder: str, reason: str, *, in_order: bool = False) -> list[Outcome]:
        """Take back all leases of a holder that is gone. in_order: it left as asked, and its groups did not fail."""
        held = [(g, stage) for g, stage in self._leases.values() if self._entries[g].work[stage].holder == holder]
        return self._take_back(held, reason, counts=not in_order)

    def _take_back(self, leases: list[tuple[str, str]], reason: str, *, counts: bool = True) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for group_id, stage in leases:
            entry = self._entries.get(group_id)
            if entry is None or stage not in entry.work:
                continue  # the group died at another stage just now
            work = entry.work[stage]
            outcomes.append(Returned(group_id, stage, work.holder, reason))
            if counts:
                outcomes += self._failed(entry, stage, work, f"{work.holder}: {reason}", retry=True)
            else:
                self._put_back(entry, stage, work)
        return outcomes + self._drop_stale()

    def _failed(self, entry: Entry, stage: str, work: Work, error: str, *, retry: bool) -> list[Outcome]:
        work.errors.append(error[:MAX_ERROR_CHARACTERS])
        self._put_back(entry, stage, work)
        # A learner that leaves says nothing against its groups: they wait for the next one.
        poison = stage != self._last.name and (not retry or len(work.errors) >= self.policy.max_attempts)
        if not poison:
            return []
        self._remove(entry, "dead")
        self._deaths_in_row[stage] += 1
        outcomes: list[Outcome] = [Dead(entry.group, stage, tuple(work.errors))]
        if self._deaths_in_row[stage] >= self.policy.dead_letter_limit:
            outcomes.append(SystematicFault(stage, self._deaths_in_row[stage], work.errors[-1]))
        return outcomes

    def _put_back(self, entry: Entry, stage: str, work: Work) -> None:
        """Nobody works on the group any more: it waits for its next attempt."""
        work.attempt += 1
        if work.lease_id is not None:
            del self._leases[work.lease_id]
            work.lease_id = None
            self._queues[stage][entry.group.group_id] = entry

    def _drop_stale(self) -> list[Outcome]:
        """Drop what waits for the learner and is too stale for its next update, where that is the policy."""
        if self.policy.on_stale != "drop":
            return []
        oldest = self.version - self.policy.max_staleness
        stale = [e for e in self._queues[self._last.name].values() if e.group.oldest_version() < oldest]
        for entry in stale:
            self._remove(entry, "dropped: stale")
        return [Dropped(entry.group, "stale") for entry in stale]

    def commit(self, version: int, group_ids: list[str]) -> tuple[list[TrajectoryGroup], list[Outcome]]:
        """The update that made `version` consumed these groups: all of them or, on an error, none. Returns them.

        Returns nothing where this very commit was done before, and its answer got lost with the broker. Raises
        ProtocolError `unknown_lease` where the version is not the next, or a group was not leased to the learner (a
        lease that is over counts too: nobody else has trained the group).
        """
        if version == self.version and group_ids == self._last_batch:
            return [], []
        if version != self.version + 1:
            raise ProtocolError("unknown_lease", f"commit of version {version} after version {self.version}")
        if len(set(group_ids)) != len(group_ids):
            raise ProtocolError("unknown_lease", "a commit names a group twice")
        entries = [self._entries[group_id] for group_id in group_ids if self._was_leased(group_id, self._last.name)]
        if len(entries) < len(group_ids):
            lost = set(group_ids) - {entry.group.group_id for entry in entries}
            raise ProtocolError("unknown_lease", f"not leased to the learner: {', '.join(sorted(lost)[:8])}")
        for entry in entries:
            self._remove(entry, "consumed")
        self._replaced_since_commit = 0
        self.version, self._last_batch = version, list(group_ids)
        return [entry.group for entry in entries], self._drop_stale()

    # Beginning anew

    def state(self) -> dict[str, Any]:
        """Plain values that `restore` needs beside the groups."""
        return {
            "version": self.version,
            "lineage": self.lineage,
            "life": self.life,
            "next_number": self._next_number,
            "deaths_in_row": dict(self._deaths_in_row),
            "replaced_since_commit": self._replaced_since_commit,
            "counts": {lane: dict(counts) for lane, counts in self._counts.items()},
        }

    def restore(self, state: dict[str, Any], entries: Iterable[Entry], last_batch: list[str]) -> None:
        """Go on after a restart of the broker, with the training groups in flight; all leases are void.

        Evaluation groups are not kept. last_batch: ids of the groups that made the version.
        """
        self.version, self.lineage, self.life = state["version"], state["lineage"], state["life"] + 1
        self._next_number = state["next_number"]
        self._deaths_in_row = Counter(state["deaths_in_row"])
        self._replaced_since_commit = state["replaced_since_commit"]
        self._counts = {lane: Counter(state["counts"][lane]) for lane in self._counts}
        evaluations = self._counts["eval"]
        evaluations["admitted"] = evaluations.total() - evaluations["admitted"]
        self._last_batch = last_batch
        for entry in entries:
            self._enter(entry, restored=True)

    def rewind(self, version: int, consumed: Iterable[Entry]) -> int:
        """The learner goes on from a checkpoint of `version`; returns the new lineage.

        consumed: all groups that later versions consumed. They make the same updates again, in the same order.
        """
        for entry in [entry for entry in self._entries.values() if entry.group.lane == "eval"]:
            self._remove(entry, "dropped: rewound")
        for entry in consumed:
            self._counts["train"]["consumed"] -= 1
            self._enter(entry)
        self.version, self._last_batch, self._replaced_since_commit = version, [], 0
        self.lineage += 1
        return self.lineage

    # Bookkeeping

    def _enter(self, entry: Entry, *, restored: bool = False) -> Entry:
        """A group is in flight from now on."""
        self._entries[entry.group.group_id] = entry
        self._in_flight[entry.group.lane] += 1
        self._open_stages(entry, restored=restored)
        return entry

    def _open_stages(self, entry: Entry, *, restored: bool = False) -> None:
        """Queue a group for each stage that it has become ready for."""
        have = entry.group.columns.keys()
        for stage in self._stages.values():
            if stage.trains and entry.group.lane == "eval":
                continue
            done = bool(stage.provides) and stage.provides <= have
            if stage.name not in entry.work and not done and stage.needs <= have:
                entry.work[stage.name] = Work(restored)
                self._queues[stage.name][entry.group.group_id] = entry

    def _leased(self, group_id: str, lease_id: str) -> tuple[Entry, str, Work]:
        """The open work that a lease was given for; the lease itself may be over, and the work leased to another."""
        entry = self._entries.get(group_id)
        match lease_id.split("/"):
            case [group, stage, attempt] if entry is not None and group == group_id and stage in entry.work:
                work = entry.work[stage]
                if attempt in self._attempts(work) or (work.restored and self._is_of_an_earlier_life(attempt)):
                    return entry, stage, work
        raise ProtocolError("unknown_lease", f"the lease {lease_id[:64]!r} is over and its work is done")

    def _attempts(self, work: Work) -> set[str]:
        """The attempts at a piece of work that were leased so far, as lease ids name them."""
        given = work.attempt + 1 if work.lease_id is not None else work.attempt
        return {f"{self.life}.{attempt}" for attempt in range(1, given)}

    def _is_of_an_earlier_life(self, attempt: str) -> bool:
        life = attempt[:20].partition(".")[0]
        return life.isdecimal() and int(life) < self.life

    def _was_leased(self, group_id: str, stage: str) -> bool:
        """Whether a group is open at a stage, and somebody works or has worked on it there."""
        entry = self._entries.get(group_id)
        if entry is None or stage not in entry.work:
            return False
        return entry.work[stage].restored or bool(self._attempts(entry.work[stage]))

    def _close(self, entry: Entry, stage: str, work: Work) -> None:
        """The group's work at a stage is over."""
        if work.lease_id is not None:
            del self._leases[work.lease_id]
        else:
            del self._queues[stage][entry.group.group_id]
        del entry.work[stage]

    def _remove(self, entry: Entry, account: str) -> None:
        """Take a group out, which leaves room for another."""
        for stage, work in list(entry.work.items()):
            self._close(entry, stage, work)
        del self._entries[entry.group.group_id]
        self._in_flight[entry.group.lane] -= 1
        self._counts[entry.group.lane][account] += 1

    def accounts(self) -> dict[Lane, dict[str, Any]]:
        """Groups by lane: admitted, consumed, dropped (by reason), dead, queued and leased (by stage)."""
        return {lane: self._account(lane) for lane in self._counts}

    def _account(self, lane: Lane) -> dict[str, Any]:
        counts = self._counts[lane]
        queued: Counter[str] = Counter()
        leased: Counter[str] = Counter()
        for entry in self._entries.values():
            if entry.group.lane != lane:
                continue
            for stage, work in entry.work.items():
                (queued if work.lease_id is None else leased)[stage] += 1
        return {
            "admitted": counts["admitted"],
            "consumed": counts["consumed"],
            "dropped": {n.removeprefix("dropped: "): c for n, c in counts.items() if n.startswith("dropped: ")},
            "dead": counts["dead"],
            "in_flight": self._in_flight[lane],
            "queued": dict(queued),
            "leased": dict(leased),
        }

    def balance(self) -> dict[Lane, int]:
        """Admitted groups that are neither consumed, dropped, dead nor in flight, by lane: 0, or there is a fault."""
        in_flight = Counter(entry.group.lane for entry in self._entries.values())
        return {
            lane: counts["admitted"] - (counts.total() - counts["admitted"]) - in_flight[lane]
            for lane, counts in self._counts.items()
        }

    def waiting(self, stage: str) -> Counter[Lane]:
        """How many groups of each lane nobody works on yet at a stage that is ready for them."""
        return Counter(entry.group.lane for entry in self._queues[stage].values())

"""The ring of slots under every order of acquiring, publishing, following, leaving and falling silent."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.broadcaster.ring import Ring, Snapshot
from shared.errors import ProtocolError

READERS = ("a", "b", "c", "d")


def make_ring(deadline_s: float = 60) -> Ring:
    ring = Ring(3, deadline_s)
    ring.use("f", is_new=True)
    return ring


def snapshot(slot: int, version: int) -> Snapshot:
    return Snapshot(slot, 0, version, {})


def published(ring: Ring, version: int, now: float = 0.0) -> int:
    slot = ring.acquire(now)
    assert slot is not None
    ring.publish("f", snapshot(slot, version))
    return slot


def test_a_rollout_gets_the_newest_and_versions_in_between_are_skipped():
    ring = make_ring()
    published(ring, 0)
    published(ring, 1)
    offer = ring.follow("a", "f", None, 0, -1)
    assert offer.version == 1
    assert ring.follow("a", "f", offer.slot, 0, 1) is None


def test_the_learner_never_writes_what_is_read_or_what_it_computes_on():
    ring = make_ring()
    first = published(ring, 0)
    ring.follow("a", "f", None, 0, -1)
    second = published(ring, 1)
    third = ring.acquire(0.0)
    assert len({first, second, third}) == 3


def test_rollouts_that_do_not_let_go_lose_their_slots_after_the_deadline_and_are_told():
    ring = make_ring()
    slot = published(ring, 0)
    ring.follow("slow", "f", None, 0, -1)
    other = published(ring, 1)
    ring.follow("loading", "f", None, 0, -1)
    newest = published(ring, 2)
    ring.follow("current", "f", newest, 0, 2)
    assert ring.acquire(10.0) is None
    assert ring.blockers() == ["slow", "loading"]
    ring.follow("loading", "f", other, 0, 1)  # it goes on to the newest, and is not done with that at the deadline
    assert ring.evict(69.0) == [] and ring.acquire(69.0) is None
    assert ring.evict(70.0) == ["slow", "loading"] and ring.acquire(70.0) in (slot, other)
    with pytest.raises(ProtocolError, match="slow kept the learner waiting for slot 0 and lost it"):
        ring.follow("slow", "f", slot, 0, 0)
    assert ring.follow("slow", "f", None, 0, -1).version == 2  # once started again it is welcome


def test_a_rollout_that_left_blocks_nobody():
    ring = make_ring()
    published(ring, 0)
    ring.follow("a", "f", None, 0, -1)
    published(ring, 1)
    ring.follow("b", "f", None, 0, -1)
    published(ring, 2)
    assert ring.acquire(0.0) is None
    ring.leave("a")
    assert ring.acquire(0.0) is not None


def test_a_rollout_that_left_while_it_waited_is_offered_nothing():
    ring = make_ring()
    slot = published(ring, 0)
    assert ring.follow("a", "f", slot, 0, 0) is None
    ring.leave("a")
    published(ring, 1)
    assert ring.offer("a", 0, 0) is None
    published(ring, 2)
    assert ring.acquire(0.0) is not None and ring.blockers() == []


def test_a_learner_that_started_again_is_the_newest_whatever_its_version():
    ring = make_ring()
    published(ring, 5)
    ring.use("another", is_new=True)
    ring.publish("another", snapshot(ring.acquire(0.0), 2))
    assert ring.newest.version == 2


def test_a_rollout_that_waits_while_the_learner_starts_again_is_offered_its_snapshot():
    ring = make_ring()
    old = published(ring, 5)
    assert ring.follow("a", "f", old, 0, 5) is None
    ring.use("another", is_new=True)
    ring.publish("another", Snapshot(ring.acquire(0.0), 1, 2, {}))
    assert ring.offer("a", 0, 5).lineage == 1


def test_a_slot_of_a_file_that_the_learner_left_blocks_no_slot_of_the_new_one():
    ring = make_ring()
    old = published(ring, 5)
    ring.use("another", is_new=True)
    assert ring.acquire(0.0) == old
    ring.publish("another", Snapshot(old, 1, 2, {}))
    ring.follow("a", "f", old + 1, 0, 5)
    ring.follow("b", "f", old + 2, 0, 5)
    ring.follow("a", "another", old, 1, 2)
    ring.follow("b", "another", old, 1, 2)
    assert ring.acquire(0.0) not in (None, old)


def test_a_file_that_another_broadcaster_offered_snapshots_of_is_refused():
    with pytest.raises(ProtocolError, match="unknown_lease"):
        Ring(3, 60).use("f", is_new=False)


def test_only_an_acquired_slot_is_published():
    ring = make_ring()
    with pytest.raises(ProtocolError, match="slot 1 was not acquired"):
        ring.publish("f", snapshot(1, 0))


class AnyOrder(RuleBasedStateMachine):
    """A learner and four rollouts, each doing what it may in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = make_ring(10.0)
        self.now = 0.0
        self.version = -1
        self.writing: int | None = None
        self.reading: dict[str, tuple[int, int]] = {}
        self.offered: dict[str, tuple[int, int]] = {}

    @rule(seconds=st.sampled_from([0.125, 5.0, 20.0]))  # sums of them are exact
    def time_passes(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.writing is None)
    @rule()
    def learner_acquires(self):
        for reader in self.ring.evict(self.now):
            held = [part[reader] for part in (self.reading, self.offered) if reader in part]
            slot, version = held[-1]
            assert min(v for _, v in held) < self.version  # who has only the newest keeps it
            self.forget(reader)
            with pytest.raises(ProtocolError):
                self.ring.follow(reader, "f", slot, 0, version)
        self.writing = self.ring.acquire(self.now)

    @precondition(lambda self: self.writing is not None)
    @rule()
    def learner_publishes(self):
        self.version += 1
        self.ring.publish("f", snapshot(self.writing, self.version))
        self.writing = None

    @rule(reader=st.sampled_from(READERS))
    def rollout_follows(self, reader):
        if reader in self.offered:
            self.reading[reader] = self.offered.pop(reader)
        slot, version = self.reading.get(reader, (None, -1))
        try:
            offer = self.ring.follow(reader, "f", slot, 0, version)
        except ProtocolError:
            self.forget(reader)
            return
        if offer is not None:
            assert offer.version == self.version > version
            self.offered[reader] = (offer.slot, offer.version)

    @rule(reader=st.sampled_from(READERS))
    def waiting_rollout_is_offered(self, reader):
        _, version = self.reading.get(reader, (None, -1))
        offer = self.ring.offer(reader, 0, version)
        if offer is not None:
            assert offer.version == self.version > version
            self.offered[reader] = (offer.slot, offer.version)

    @rule(reader=st.sampled_from(READERS))
    def rollout_leaves(self, reader):
        self.ring.leave(reader)
        self.forget(reader)

    def forget(self, reader):
        self.reading.pop(reader, None)
        self.offered.pop(reader, None)

    def holds(self, reader, slot):
        return slot in (self.reading.get(reader, (None,))[0], self.offered.get(reader, (None,))[0])

    @invariant()
    def nobody_reads_what_is_written(self):
        if self.writing is not None:
            assert not [reader for reader in READERS if self.holds(reader, self.writing)]
            assert self.ring.newest is None or self.ring.newest.slot != self.writing

    def teardown(self):
        if self.writing is None:
            self.ring.acquire(self.now)
            self.ring.evict(self.now + 10.0)
            assert self.ring.acquire(self.now + 10.0) is not None  # the learner never waits forever


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

"""The ledger under random orders of everything that may happen: what must hold always does."""

from __future__ import annotations

import contextlib
from collections import Counter

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from services.broker.gate import Policy
from services.broker.ledger import Entry, Ledger
from services.broker.outcomes import Dead, Dropped, Evaluated, Replaced
from shared.errors import ProtocolError
from shared.graph import REFERENCE, learner_stage, rollout_stage, scoring_stage
from shared.group import Prompt, ragged, ragged_text

LEASE_S = 10.0
MIDDLE = [rollout_stage(greedy=False), scoring_stage("reward", ["exact"]), REFERENCE]
STAGES = [*MIDDLE, learner_stage(MIDDLE)]
HOLDERS = {"rollout": 3, "reward": 2, "reference": 1, "learner": 1}


class LedgerMachine(RuleBasedStateMachine):
    """A run with 3 rollouts, 2 rewards, a reference and a learner that do their work in any order, or fail to."""

    @initialize(
        max_staleness=st.integers(0, 3),
        prompts_per_step=st.integers(1, 3),
        on_stale=st.sampled_from(["train", "drop", "wait"]),
        max_attempts=st.integers(1, 3),
        replace_equal=st.sampled_from([0, 1, 3]),
    )
    def begin(self, max_staleness, prompts_per_step, on_stale, max_attempts, replace_equal):
        self.policy = Policy(
            prompts_per_step=prompts_per_step,
            total_steps=6,
            max_staleness=max_staleness,
            on_stale=on_stale,
            replace_equal=replace_equal,
            max_attempts=max_attempts,
            dead_letter_limit=1000,
            max_in_flight_groups=50,
            lease_s=LEASE_S,
        )
        self.ledger = Ledger(STAGES, self.policy)
        self.now = 0.0
        self.holds = {f"rollout-{i}": 0 for i in range(HOLDERS["rollout"])}
        self.grants = []  # every lease ever given, with the version of the weights that its holder had
        self.batch = []
        self.batches = {}  # of each version, also of those that are to be made again
        self.admitted, self.gone, self.consumed = Counter(), Counter(), Counter()
        self.given_back = 0
        self.replaced = 0

    def take(self, outcomes):
        for outcome in outcomes:
            match outcome:
                case Dead(group, _, errors):
                    assert len(errors) <= self.policy.max_attempts
                    self.gone[group.group_id] += 1
                    self.given_back += group.lane == "train"
                case Dropped(group, _):
                    assert self.policy.on_stale == "drop"
                    self.gone[group.group_id] += 1
                    self.given_back += 1
                case Replaced(group):
                    self.replaced += 1
                    assert self.replaced <= self.policy.replace_equal * self.policy.prompts_per_step
                    self.gone[group.group_id] += 1
                    self.given_back += 1
                case Evaluated(group, _):
                    self.gone[group.group_id] += 1

    @rule(n=st.integers(1, 4))
    def admit(self, n):
        for _ in range(min(n, self.ledger.room())):
            self.admitted[self.ledger.admit("train", Prompt(0, 0, "p")).group.group_id] += 1

    @rule()
    def evaluate(self):
        self.admitted[self.ledger.admit("eval", Prompt(0, 0, "p")).group.group_id] += 1

    @rule(rollout=st.integers(0, 2))
    def take_weights(self, rollout):
        self.holds[f"rollout-{rollout}"] = self.ledger.version

    @rule(stage=st.sampled_from(["rollout", "reward", "reference"]), holder=st.integers(0, 2), n=st.integers(1, 4))
    def lease(self, stage, holder, n):
        name = f"{stage}-{holder % HOLDERS[stage]}"
        version = self.holds.get(name, 0)
        for grant in self.ledger.lease(stage, name, self.now, max_groups=n, version=version):
            group = grant.entry.group
            if stage == "rollout":
                assert version >= group.min_version
            self.grants.append((grant.lease_id, group, stage, name, version))

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), newer=st.booleans())
    def complete(self, data, newer):
        lease_id, group, stage, holder, version = data.draw(st.sampled_from(self.grants))
        there = stage_done(group, stage)
        tokens = self.holds[holder] if newer and stage == "rollout" else version
        try:
            self.take(self.ledger.complete(group.group_id, lease_id, columns_of(stage, version, max(version, tokens))))
        except ProtocolError as refusal:
            assert refusal.code == "unknown_lease"
        else:
            assert not there and group.group_id not in self.consumed

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), retry=st.booleans())
    def fail(self, data, retry):
        lease_id, group, *_ = data.draw(st.sampled_from(self.grants))
        try:
            self.take(self.ledger.fail(group.group_id, lease_id, "error", retry=retry))
        except ProtocolError as refusal:
            assert refusal.code == "unknown_lease"

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def expire(self, seconds):
        self.now += seconds
        self.take(self.ledger.expire(self.now))

    @rule(holder=st.sampled_from([f"{stage}-{i}" for stage, n in HOLDERS.items() for i in range(n)]))
    def hear_of(self, holder):
        self.ledger.extend(holder, self.now)

    @rule(holder=st.sampled_from([f"{stage}-{i}" for stage, n in HOLDERS.items() for i in range(n)]))
    def die(self, holder):
        self.take(self.ledger.release(holder, "died"))
        if holder == "learner-0":
            self.batch = []

    @precondition(lambda self: not self.batch)
    @rule()
    def lease_batch(self):
        n = self.policy.prompts_per_step
        grants = self.ledger.lease("learner", "learner-0", self.now, max_groups=n, min_groups=n)
        assert len(grants) in (0, n)
        self.batch = [grant.entry.group for grant in grants]
        again = self.batches.get(self.ledger.version + 1)
        if again is not None:
            assert self.batch == again
        elif self.policy.on_stale != "train" or self.policy.max_staleness == 0:
            staleness = [self.ledger.version - group.oldest_version() for group in self.batch]
            assert max(staleness, default=0) <= self.policy.max_staleness

    @precondition(lambda self: self.batch)
    @rule()
    def commit(self):
        ids = [group.group_id for group in self.batch]
        consumed, outcomes = self.ledger.commit(self.ledger.version + 1, ids)
        assert [group.group_id for group in consumed] == ids
        self.consumed.update(ids)
        self.batches[self.ledger.version] = self.batch
        self.batch = []
        self.replaced = 0
        self.take(outcomes)
        assert self.ledger.commit(self.ledger.version, ids) == ([], [])  # its answer was lost

    @rule()
    def restart(self):
        """The broker is killed, and another goes on with what the journal has."""
        before, version = self.ledger, self.ledger.version
        state = msgpack.unpackb(msgpack.packb(before.state()))
        entries = [Entry(e.group, e.number, e.admitted_at, e.turn) for e in before._entries.values()]
        self.ledger = Ledger(STAGES, self.policy)
        last_batch = [group.group_id for group in self.batches.get(version, [])]
        self.ledger.restore(state, [e for e in entries if e.group.lane == "train"], last_batch)
        self.gone.update(e.group.group_id for e in entries if e.group.lane == "eval")
        # The learner, whose leases are void, still may commit what it has: or asks anew.

    @rule(data=st.data())
    def rewind(self, data):
        """The learner is killed, and another goes on from a checkpoint."""
        version = data.draw(st.integers(0, self.ledger.version))
        consumed = []
        for later in range(version + 1, self.ledger.version + 1):
            for place, group in enumerate(self.batches[later]):
                number = int(group.group_id[1:])
                consumed.append(Entry(group, number, 0, turn=(later, place)))
                del self.consumed[group.group_id]
        evaluated = [e.group.group_id for e in self.ledger._entries.values() if e.group.lane == "eval"]
        self.take(self.ledger.release("learner-0", "died"))
        lineage = self.ledger.lineage
        assert self.ledger.rewind(version, consumed) == lineage + 1
        self.gone.update(evaluated)
        self.batch, self.replaced = [], 0

    @invariant()
    def no_group_is_lost_or_counted_twice(self):
        if not hasattr(self, "ledger"):
            return
        in_flight = self.ledger._entries.keys()
        assert all(count == 1 for count in (self.gone + self.consumed).values())
        assert self.admitted.keys() == self.gone.keys() | self.consumed.keys() | in_flight
        assert self.ledger.balance() == {"train": 0, "eval": 0}
        for account in self.ledger.accounts().values():
            assert account["admitted"] == (
                account["consumed"] + sum(account["dropped"].values()) + account["dead"] + account["in_flight"]
            )

    @invariant()
    def every_group_in_flight_is_queued_or_leased_somewhere(self):
        if not hasattr(self, "ledger"):
            return
        for entry in self.ledger._entries.values():
            assert entry.work
            for stage, work in entry.work.items():
                queued = entry.group.group_id in self.ledger._queues[stage]
                assert queued == (work.lease_id is None)
                assert queued or work.lease_id in self.ledger._leases

    @invariant()
    def the_gate_is_never_exceeded(self):
        if not hasattr(self, "ledger"):
            return
        steps = min(self.ledger.version + self.policy.max_staleness + 1, self.policy.total_steps)
        if any(version > self.ledger.version for version in self.batches):
            return  # what was admitted for versions that are to be made again is more
        train = self.ledger.accounts()["train"]["admitted"]
        assert train - self.given_back <= steps * self.policy.prompts_per_step


def stage_done(group, stage):
    return {"rollout": "tokens", "reward": "rewards", "reference": "ref_logprobs"}[stage] in group.columns


def columns_of(stage, version, newest):
    """One sample of two tokens; the second may come from newer weights than the first."""
    if stage == "reference":
        return {"ref_logprobs": np.zeros(2, dtype="f4")}
    if stage == "reward":
        one = {"rewards": np.ones(1, dtype="f4"), "reward_status": np.zeros(1, dtype="u1")}
        signal = {"signal/exact": np.ones(1, dtype="f4"), "signal_status/exact": np.zeros(1, dtype="u1")}
        return one | signal | ragged_text("reward_reasons", [""])
    return (
        ragged("tokens", [[1, 2]], "i4")
        | ragged_text("text", ["a"])
        | {
            "prompt_tokens": np.array([1], dtype="i4"),
            "loss_mask": np.ones(2, dtype=bool),
            "behavior_logprobs": np.zeros(2, dtype="f4"),
            "versions": np.array([[version, 1], [newest, 1]], dtype="i4"),
            "versions_offsets": np.array([0, 2], dtype="i8"),
            "finish_reasons": np.zeros(1, dtype="u1"),
        }
    )


def test_nothing_is_lost_doubled_or_too_stale_in_any_order():
    limits = settings(
        max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(LedgerMachine, settings=limits)


@pytest.mark.parametrize("on_stale", ["train", "drop", "wait"])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_run_whose_workers_go_on_failing_still_reaches_its_last_version(on_stale, max_staleness, seed):
    """Liveness: as long as somebody works, no order of failures stops a run, and the bound of staleness holds."""
    random = np.random.default_rng(seed)
    policy = Policy(
        prompts_per_step=2,
        total_steps=8,
        max_staleness=max_staleness,
        on_stale=on_stale,
        replace_equal=2.0,
        max_attempts=2,
        dead_letter_limit=1000,
        max_in_flight_groups=50,
        lease_s=LEASE_S,
    )
    ledger = Ledger(STAGES, policy)
    working = []
    for _ in range(3000):
        for _ in range(ledger.room()):
            ledger.admit("train", Prompt(0, 0, "p"))
        stage = random.choice(["rollout", "reward", "reference"])
        working += [
            (stage, grant.lease_id, grant.entry.group, ledger.version)
            for grant in ledger.lease(stage, stage, 0.0, max_groups=2, version=ledger.version)
        ]
        if working and random.random() < 0.7:
            stage, lease_id, group, version = working.pop(random.integers(len(working)))
            with contextlib.suppress(ProtocolError):  # it may have died or been dropped meanwhile
                if random.random() < 0.2:
                    ledger.fail(group.group_id, lease_id, "error", retry=True)
                else:
                    ledger.complete(group.group_id, lease_id, columns_of(stage, version, version))
        batch = ledger.lease("learner", "learner", 0.0, max_groups=2, min_groups=2)
        if batch:
            staleness = max(ledger.version - grant.entry.group.oldest_version() for grant in batch)
            assert on_stale == "train" or staleness <= max_staleness
            assert staleness == 0 or max_staleness > 0
            ledger.commit(ledger.version + 1, [grant.entry.group.group_id for grant in batch])
        if ledger.version == policy.total_steps:
            break
    assert ledger.version == policy.total_steps
    assert ledger.accounts()["train"]["consumed"] == 16
    assert ledger.accounts()["train"]["in_flight"] == 0

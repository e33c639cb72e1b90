"""The ledger, rule by rule."""

from __future__ import annotations

import numpy as np
import pytest

from services.broker.gate import Policy
from services.broker.ledger import Entry, Ledger
from services.broker.outcomes import Dead, Dropped, Evaluated, Replaced, Returned, SystematicFault
from shared.errors import ProtocolError
from shared.graph import Stage
from shared.group import Prompt

LEASE_S = 10.0


@pytest.fixture
def make(stages, columns_of):
    def make_run(**settings):
        return Run(stages, columns_of, **settings)

    return make_run


class Run:
    """A ledger with short ways to move groups through its stages."""

    def __init__(self, stages, columns_of, **settings):
        policy = {
            "prompts_per_step": 2,
            "total_steps": 10,
            "max_staleness": 1,
            "on_stale": "train",
            "replace_equal": 0.0,
            "max_attempts": 3,
            "dead_letter_limit": 3,
            "max_in_flight_groups": 100,
            "lease_s": LEASE_S,
        }
        self.ledger = Ledger(stages, Policy(**(policy | settings)))
        self.columns_of = columns_of

    def admit(self, n=None, lane="train"):
        n = self.ledger.room() if n is None else n
        return [self.ledger.admit(lane, Prompt(i, 0, f"prompt {i}")).group for i in range(n)]

    def lease(self, stage, n=100, *, holder=None, now=0.0, **more):
        return self.ledger.lease(stage, holder or f"{stage}-0", now, max_groups=n, **more)

    def finish(self, grant, version=0):
        _, stage, _ = grant.lease_id.split("/")
        columns = self.columns_of(stage, version)
        return self.ledger.complete(grant.entry.group.group_id, grant.lease_id, columns)

    def pass_through(self, version, n=100):
        """Generate with the weights of `version`, and score."""
        happened = [o for g in self.lease("rollout", n, version=version) for o in self.finish(g, version)]
        return happened + [o for g in self.lease("reward") for o in self.finish(g)]

    def fail(self, grant, error, *, retry=True):
        return self.ledger.fail(grant.entry.group.group_id, grant.lease_id, error, retry=retry)

    def commit(self, grants):
        return self.ledger.commit(self.ledger.version + 1, ids(grants))

    def account(self, lane="train"):
        return self.ledger.accounts()[lane]


def ids(grants):
    return [grant.entry.group.group_id for grant in grants]


def score(run, *rewards):
    """Score the groups that are ready for it, oldest first: one list of rewards a group."""
    happened = []
    for grant, group_rewards in zip(run.lease("reward", len(rewards)), rewards, strict=True):
        columns = run.columns_of("reward") | {"rewards": np.array(group_rewards, dtype="f4")}
        happened += run.ledger.complete(grant.entry.group.group_id, grant.lease_id, columns)
    return happened


# Groups of equal rewards


def test_groups_of_equal_rewards_are_trained_by_default(make):
    run = make()
    run.admit()
    assert run.pass_through(0) == [] and len(run.lease("learner", 4)) == 4


def test_a_group_of_equal_rewards_makes_room_for_another(make):
    run = make(replace_equal=1)
    equal, *_ = run.admit()
    for grant in run.lease("rollout"):
        run.finish(grant)
    assert score(run, [1, 1], [0, 1], [1, 0], [0, 1]) == [Replaced(equal)]
    assert run.account()["dropped"] == {"equal rewards": 1} and run.ledger.room() == 1
    assert len(run.lease("learner", 4)) == 3


def test_no_more_groups_are_replaced_between_two_updates_than_allowed(make):
    run = make(replace_equal=0.5)  # one of the two of an update
    run.admit()
    for grant in run.lease("rollout"):
        run.finish(grant)
    assert [type(outcome) for outcome in score(run, [1, 1], [1, 1], [0, 0])] == [Replaced]
    run.commit(run.lease("learner", 2, min_groups=2))
    assert [type(outcome) for outcome in score(run, [1, 1])] == [Replaced]


def test_evaluation_groups_are_never_replaced(make):
    run = make(replace_equal=1)
    run.admit(1, "eval")
    assert [type(outcome) for outcome in run.pass_through(0)] == [Evaluated]


# Admission


def test_the_gate_admits_one_step_and_as_many_as_staleness_allows(make):
    assert make(max_staleness=0).ledger.room() == 2
    assert make(max_staleness=3).ledger.room() == 8


def test_a_commit_opens_the_gate_by_one_step(make):
    run = make()
    run.admit()
    assert run.ledger.room() == 0
    run.pass_through(0)
    run.commit(run.lease("learner", 2))
    assert run.ledger.room() == 2


def test_nothing_is_admitted_beyond_the_last_step(make):
    assert make(total_steps=1, max_staleness=5).ledger.room() == 2


def test_groups_in_memory_are_bounded(make):
    assert make(max_staleness=5, max_in_flight_groups=3).ledger.room() == 3


def test_evaluation_groups_do_not_count_against_the_gate(make):
    run = make()
    run.admit(20, "eval")
    assert run.ledger.room() == 4


def test_each_group_tells_the_oldest_weights_that_may_generate_it(make):
    run = make(max_staleness=1)
    assert [group.min_version for group in run.admit()] == [0, 0, 0, 0]
    run.pass_through(0)
    run.commit(run.lease("learner", 2))
    assert [group.min_version for group in run.admit()] == [1, 1]


def test_a_rollout_gets_no_group_that_is_too_new_for_its_weights(make):
    run = make(max_staleness=0)
    run.admit()
    run.pass_through(0)
    run.commit(run.lease("learner", 2))
    run.admit()
    assert run.lease("rollout", version=0) == []
    assert len(run.lease("rollout", version=1)) == 2


def test_a_group_in_the_place_of_a_dead_one_may_not_be_older_than_its_update_allows(make):
    run = make(max_staleness=0)
    run.admit()
    run.pass_through(0, 1)
    first, dying = run.lease("learner"), run.lease("rollout")[0]
    run.commit(first)
    run.fail(dying, "no", retry=False)
    assert run.admit(1)[0].min_version == 1


# Stages


def test_a_group_goes_from_stage_to_stage_with_the_columns_it_has(make):
    run = make()
    group = run.admit(1)[0]
    assert run.lease("reward") == [] and run.lease("learner") == []
    run.finish(run.lease("rollout")[0])
    assert run.lease("rollout") == [] and run.lease("learner") == []
    run.finish(run.lease("reward")[0])
    assert ids(run.lease("learner")) == [group.group_id]
    assert {"tokens", "rewards"} <= group.columns.keys()


def test_stages_that_do_not_need_each_other_work_on_a_group_at_the_same_time(stages, columns_of):
    rollout, reward, learner = stages
    reference = Stage("reference", needs=frozenset({"tokens"}), provides=frozenset({"ref_logprobs"}))
    waiting = Stage("learner", needs=learner.needs | {"ref_logprobs"}, provides=frozenset())
    run = Run([rollout, reward, reference, waiting], columns_of)
    run.admit(1)
    run.finish(run.lease("rollout")[0])
    scoring, referring = run.lease("reward")[0], run.lease("reference")[0]
    run.finish(scoring)
    assert run.lease("learner") == []
    group = referring.entry.group
    run.ledger.complete(group.group_id, referring.lease_id, {"ref_logprobs": np.zeros(4, dtype="f4")})
    assert len(run.lease("learner")) == 1


def test_the_oldest_groups_are_leased_first_and_no_more_than_asked_for(make):
    run = make()
    groups = run.admit()
    assert ids(run.lease("rollout", 3)) == [group.group_id for group in groups[:3]]


def test_a_rollout_gets_no_more_samples_than_it_has_room_for(make):
    run = make()
    run.admit()
    assert len(run.lease("rollout", max_samples=19, samples={"train": 8, "eval": 1})) == 2


def test_other_columns_than_those_of_the_stage_are_refused_and_change_nothing(make):
    run = make()
    run.admit(1)
    grant = run.lease("rollout")[0]
    columns = run.columns_of("rollout")
    for wrong in (columns | {"rewards": np.zeros(2, dtype="f4")}, {"tokens": columns["tokens"]}):
        with pytest.raises(ProtocolError, match="bad_column"):
            run.ledger.complete(grant.entry.group.group_id, grant.lease_id, wrong)
    assert run.account()["leased"] == {"rollout": 1}
    run.finish(grant)


def test_nobody_can_complete_the_last_stage(make):
    run = make()
    run.admit(1)
    run.pass_through(0)
    grant = run.lease("learner")[0]
    with pytest.raises(ProtocolError, match="unknown_lease"):
        run.ledger.complete(grant.entry.group.group_id, grant.lease_id, {})
    assert run.account()["leased"] == {"learner": 1}


def test_a_lease_that_was_never_given_cannot_be_completed(make):
    run = make()
    group = run.admit(1)[0]
    for lease_id in (f"{group.group_id}/rollout/0.1", f"{group.group_id}/nothing/0.1", "nonsense", "g9/rollout/0.1"):
        with pytest.raises(ProtocolError, match="unknown_lease"):
            run.ledger.complete(group.group_id, lease_id, run.columns_of("rollout"))


# Leases that fail


def test_an_expired_lease_goes_back_with_one_more_attempt(make):
    run = make()
    run.admit(1)
    first = run.lease("rollout", holder="a", now=0.0)[0]
    assert run.ledger.expire(LEASE_S - 0.1) == []
    assert [type(o) for o in run.ledger.expire(LEASE_S)] == [Returned]
    second = run.lease("rollout", holder="b", now=LEASE_S)[0]
    assert (first.attempt, second.attempt) == (1, 2)


def test_a_sign_of_life_extends_the_leases_of_its_holder_only(make):
    run = make()
    run.admit(2)
    run.lease("rollout", 1, holder="a")
    run.lease("rollout", 1, holder="b")
    run.ledger.extend("a", 8.0)
    assert [outcome.holder for outcome in run.ledger.expire(11.0)] == ["b"]


def test_a_holder_that_is_gone_gives_all_its_leases_back(make):
    run = make()
    run.admit(3)
    run.lease("rollout", 2, holder="a")
    run.lease("rollout", 1, holder="b")
    assert len(run.ledger.release("a", "not heard of")) == 2
    assert run.account()["queued"] == {"rollout": 2} and run.account()["leased"] == {"rollout": 1}


def test_the_first_completion_wins_whatever_its_attempt(make):
    run = make()
    run.admit(1)
    late = run.lease("rollout", holder="a")[0]
    run.ledger.expire(LEASE_S)
    second = run.lease("rollout", holder="b", now=LEASE_S)[0]
    run.finish(late)
    with pytest.raises(ProtocolError, match="unknown_lease"):
        run.finish(second)
    assert run.account()["queued"] == {"reward": 1}


def test_a_late_completion_counts_while_nobody_has_the_group(make):
    run = make()
    run.admit(1)
    late = run.lease("rollout")[0]
    run.ledger.expire(LEASE_S)
    run.finish(late)
    assert run.lease("rollout") == []


def test_a_failure_reported_for_a_lease_that_is_over_does_not_count(make):
    run = make()
    run.admit(1)
    late = run.lease("rollout", holder="a")[0]
    run.ledger.expire(LEASE_S)
    run.lease("rollout", holder="b", now=LEASE_S)
    assert run.fail(late, "too late") == []
    assert run.account()["leased"] == {"rollout": 1}


def test_a_group_that_fails_too_often_is_a_dead_letter_with_every_error(make):
    run = make(max_attempts=3)
    run.admit()
    for error in ("one", "two"):
        assert run.fail(run.lease("rollout", 1)[0], error) == []
    (dead,) = run.fail(run.lease("rollout", 1)[0], "three")
    assert isinstance(dead, Dead) and dead.errors == ("one", "two", "three") and dead.stage == "rollout"
    assert run.account()["dead"] == 1


def test_a_failure_that_is_hopeless_is_not_tried_again(make):
    run = make()
    run.admit(1)
    (dead,) = run.fail(run.lease("rollout")[0], "cannot", retry=False)
    assert isinstance(dead, Dead)


def test_a_dead_group_gives_its_place_back(make):
    run = make()
    run.admit()
    run.fail(run.lease("rollout", 1)[0], "cannot", retry=False)
    assert run.ledger.room() == 1
    run.admit()
    assert run.ledger.room() == 0


def test_a_dead_group_takes_its_work_at_other_stages_along(stages, columns_of):
    rollout, reward, learner = stages
    reference = Stage("reference", needs=frozenset({"tokens"}), provides=frozenset({"ref_logprobs"}))
    run = Run([rollout, reward, reference, learner], columns_of)
    run.admit(1)
    run.finish(run.lease("rollout")[0])
    scoring, referring = run.lease("reward", holder="a")[0], run.lease("reference", holder="a")[0]
    run.fail(scoring, "cannot", retry=False)
    with pytest.raises(ProtocolError, match="unknown_lease"):
        run.finish(referring)
    assert run.ledger.release("a", "gone") == [] and run.ledger.balance() == {"train": 0, "eval": 0}


def test_deaths_in_a_row_at_one_stage_stop_the_run_with_the_last_error(make):
    run = make(dead_letter_limit=2, max_staleness=3)
    run.admit()
    first, second = run.lease("rollout", 2)
    assert [type(o) for o in run.fail(first, "first", retry=False)] == [Dead]
    (_, fault) = run.fail(second, "second", retry=False)
    assert fault == SystematicFault("rollout", 2, "second")


def test_one_completion_ends_a_row_of_deaths(make):
    run = make(dead_letter_limit=2, max_staleness=3)
    run.admit()
    first, second, third = run.lease("rollout", 3)
    run.fail(first, "first", retry=False)
    run.finish(second)
    assert [type(o) for o in run.fail(third, "third", retry=False)] == [Dead]


def test_a_long_error_is_cut(make):
    run = make()
    run.admit(1)
    (dead,) = run.fail(run.lease("rollout")[0], "x" * 100_000, retry=False)
    assert len(dead.errors[0]) == 2000


def test_a_learner_that_leaves_says_nothing_against_its_groups(make):
    run = make(max_attempts=1)
    run.admit()
    run.pass_through(0)
    run.lease("learner", 2, holder="learner")
    assert all(isinstance(o, Returned) for o in run.ledger.release("learner", "gone"))
    assert len(run.lease("learner", 4, holder="learner")) == 4


# The learner


def test_the_learner_waits_for_enough_groups(make):
    run = make()
    run.admit()
    run.pass_through(0, 1)
    assert run.lease("learner", 2, min_groups=2) == []
    run.pass_through(0, 1)
    assert len(run.lease("learner", 2, min_groups=2)) == 2


def test_the_learner_gets_the_oldest_versions_first(make):
    run = make(max_staleness=2)
    groups = run.admit()[:3]
    for grant, version in zip(run.lease("rollout", 3, version=2), (2, 0, 1), strict=True):
        run.finish(grant, version)
    for grant in run.lease("reward"):
        run.finish(grant)
    assert ids(run.lease("learner", 2)) == [groups[1].group_id, groups[2].group_id]


def test_a_commit_consumes_its_groups_once(make):
    run = make()
    run.admit()
    run.pass_through(0)
    batch = run.lease("learner", 2)
    consumed, _ = run.commit(batch)
    assert [group.group_id for group in consumed] == ids(batch)
    with pytest.raises(ProtocolError, match="unknown_lease"):
        run.commit(batch)
    assert run.ledger.version == 1 and run.account()["consumed"] == 2


@pytest.mark.parametrize("version", [0, 2])
def test_a_commit_of_another_version_than_the_next_is_refused(make, version):
    run = make()
    run.admit()
    run.pass_through(0)
    batch = run.lease("learner", 2)
    with pytest.raises(ProtocolError, match="unknown_lease"):
        run.ledger.commit(version, ids(batch))
    assert run.account()["consumed"] == 0


def test_a_commit_with_one_wrong_group_consumes_none(make):
    run = make()
    run.admit()
    run.pass_through(0)
    batch = run.lease("learner", 2)
    in_queue = run.ledger.accounts()["train"]["queued"]["learner"]
    for wrong in ([*ids(batch), "g99999999"], [*ids(batch), ids(batch)[0]], [*ids(batch), "g00000003"]):
        with pytest.raises(ProtocolError, match="unknown_lease"):
            run.ledger.commit(1, wrong)
    assert in_queue == 2 and run.ledger.version == 0 and run.account()["leased"] == {"learner": 2}


def test_a_learner_taken_for_gone_may_still_commit_what_it_trained(make):
    run = make()
    run.admit()
    run.pass_through(0)
    batch = run.lease("learner", 2)
    run.ledger.expire(LEASE_S)
    run.commit(batch)
    assert run.account()["consumed"] == 2


def test_stale_groups_are_trained_by_default(make):
    run = stale_run(make, "train")
    assert run.ledger.version == 2
    assert len(run.lease("learner", 2, min_groups=2)) == 2


def stale_run(make, on_stale):
    """Version 2 is there, and one group of version 0 has only just arrived."""
    run = make(on_stale=on_stale, max_staleness=1)
    slow = run.admit()[0]
    slow_grant = run.lease("rollout", 1)[0]
    for version in (0, 1):
        run.pass_through(version)
        run.admit()
        run.pass_through(version)
        run.commit(run.lease("learner", 2, min_groups=2))
    run.admit()
    run.pass_through(2)
    run.finish(slow_grant, 0)
    run.happened = run.finish(run.lease("reward")[0])
    run.slow = slow
    return run


def test_a_group_that_arrives_too_stale_is_dropped_and_gives_its_place_back(make):
    run = stale_run(make, "drop")
    assert run.happened == [Dropped(run.slow, "stale")]
    assert run.account()["dropped"] == {"stale": 1} and run.ledger.room() == 1


def test_a_group_that_becomes_too_stale_by_a_commit_is_dropped(make):
    run = make(on_stale="drop", prompts_per_step=1)
    slow, _ = run.admit()
    for grant in run.lease("rollout"):
        run.finish(grant)
    scoring, other = run.lease("reward")
    run.finish(other)
    run.commit(run.lease("learner", 1))
    run.admit()
    run.pass_through(1)
    batch = run.lease("learner", 1)
    assert run.finish(scoring) == []
    assert run.commit(batch)[1] == [Dropped(slow, "stale")]


def test_a_stale_group_that_the_learner_gives_back_is_dropped(make):
    run = make(on_stale="drop", prompts_per_step=1, max_staleness=0)
    run.admit()
    run.pass_through(0)
    run.lease("learner", 1, holder="first")
    run.ledger.version = 1
    assert [type(outcome) for outcome in run.ledger.release("first", "gone")] == [Returned, Dropped]


def test_the_learner_waits_for_a_group_that_would_be_too_stale_for_the_next_update(make):
    run = make(on_stale="wait", max_staleness=1)
    run.admit()
    slow = run.lease("rollout", 1)[0]
    run.pass_through(0)
    run.commit(run.lease("learner", 2, min_groups=2))
    run.admit()
    run.pass_through(1)
    assert run.lease("learner", 2, min_groups=2) == []
    run.finish(slow, 0)
    run.finish(run.lease("reward")[0])
    assert slow.entry in [grant.entry for grant in run.lease("learner", 2, min_groups=2)]


def test_the_learner_waits_when_too_many_groups_would_have_to_be_in_one_later_update(make):
    """With room for three versions, a newer group may not take the place of one that is due soon."""
    run = make(on_stale="wait", max_staleness=2, prompts_per_step=1)
    run.admit()
    slow = run.lease("rollout", 2)
    run.pass_through(0)
    run.commit(run.lease("learner", 1))
    run.admit()
    run.pass_through(1)
    assert run.lease("learner", 1) == []
    run.finish(slow[0])
    run.finish(run.lease("reward")[0])
    assert run.lease("learner", 1)[0].entry is slow[0].entry


# Evaluations


def test_an_evaluation_group_is_done_without_the_learner(make):
    run = make()
    group = run.admit(1, "eval")[0]
    assert run.pass_through(0) == [Evaluated(group, 0)]
    assert run.account("eval")["consumed"] == 1 and run.lease("learner") == []


def test_the_evaluation_of_version_0_goes_first(make):
    run = make()
    run.admit()
    group = run.admit(1, "eval")[0]
    assert ids(run.lease("rollout", 1)) == [group.group_id]


def test_later_evaluations_go_behind_training_until_a_newer_version_is_out(make):
    run = make(max_staleness=1)
    run.admit()
    run.pass_through(0)
    run.commit(run.lease("learner", 2))
    evaluated = run.admit(1, "eval")[0]
    trained = run.admit()
    assert ids(run.lease("rollout", 1, version=1)) == [trained[0].group_id]
    run.commit(run.lease("learner", 2))
    assert ids(run.lease("rollout", 1, version=2)) == [evaluated.group_id]


def test_evaluation_is_done_by_the_version_it_is_of_or_a_newer_one(make):
    run = make()
    run.admit()
    run.pass_through(0)
    run.commit(run.lease("learner", 2))
    run.admit(1, "eval")
    assert run.lease("rollout", version=0) == []


def test_a_holder_that_leaves_in_order_says_nothing_against_its_groups(make):
    run = make(max_attempts=1)
    run.admit(1)
    for attempt in (1, 2, 3):
        (grant,) = run.lease("rollout")
        assert grant.attempt == attempt
        (returned,) = run.ledger.release("rollout-0", "left", in_order=True)
        assert isinstance(returned, Returned)
    assert run.ledger.accounts()["train"]["dead"] == 0


# Beginning anew


def entry(group, turn=None):
    return Entry(group, int(group.group_id[1:]), 0, turn)


def test_a_new_run_goes_on_from_a_checkpoint_with_a_new_lineage(make):
    run = make()
    assert run.ledger.rewind(7, []) == 1
    assert run.ledger.version == 7 and run.ledger.room() == 4
    assert [group.min_version for group in run.admit()] == [6, 6, 7, 7]


def test_the_updates_after_a_checkpoint_are_made_again_of_the_same_groups_in_the_same_order(make):
    run = make(max_staleness=3)
    run.admit()
    run.pass_through(0)
    batches = []
    for version in (1, 2, 3):
        batch = [grant.entry.group for grant in run.lease("learner", 2, min_groups=2)][::-1]
        run.ledger.commit(version, [group.group_id for group in batch])
        batches.append(batch)
    consumed = [entry(g, (v, place)) for v, batch in enumerate(batches, 1) for place, g in enumerate(batch)]
    run.ledger.rewind(1, consumed[2:])
    assert run.ledger.accounts()["train"]["consumed"] == 2 and run.ledger.balance()["train"] == 0
    for version in (2, 3):
        again = [grant.entry.group for grant in run.lease("learner", 2, min_groups=2)]
        assert again == batches[version - 1]
        run.ledger.commit(version, [group.group_id for group in again])


def restarted(make, run, last_batch=(), **settings):
    """Another broker's ledger, which goes on with what the journal has of the first."""
    other = make(**settings)
    entries = [entry(e.group) for e in run.ledger._entries.values() if e.group.lane == "train"]
    other.ledger.restore(run.ledger.state(), entries, list(last_batch))
    return other


def test_a_broker_that_was_restarted_has_every_group_and_its_columns_again(make):
    run = make()
    run.admit()
    run.pass_through(0, 1)
    evaluated = run.admit(2, "eval")
    after = restarted(make, run)
    account = after.ledger.accounts()["train"]
    assert account["queued"] == {"rollout": 3, "learner": 1} and account["leased"] == {}
    assert after.ledger.balance() == {"train": 0, "eval": 0}
    assert after.ledger.room() == 0
    assert after.admit(1, "eval")[0].group_id not in {group.group_id for group in evaluated}


def test_work_that_was_leased_before_a_restart_of_the_broker_may_still_be_completed(make):
    run = make()
    run.admit()
    before = run.lease("rollout")[0]
    after = restarted(make, run)
    leased = after.lease("rollout", 1)[0]
    assert leased.entry.group.group_id == before.entry.group.group_id and leased.lease_id != before.lease_id
    after.finish(before)
    with pytest.raises(ProtocolError, match="unknown_lease"):
        after.finish(leased)
    assert after.ledger.accounts()["train"]["queued"] == {"rollout": 3, "reward": 1}


def test_a_lease_of_a_group_that_the_journal_did_not_have_yet_is_refused(make):
    run = make()
    after = restarted(make, run)
    run.admit(1)
    after.admit(1)
    with pytest.raises(ProtocolError, match="unknown_lease"):
        after.finish(run.lease("rollout")[0])


def test_a_commit_whose_answer_was_lost_is_answered_again_and_one_that_was_lost_is_made(make):
    run = make()
    run.admit()
    run.pass_through(0)
    batch = [grant.entry.group.group_id for grant in run.lease("learner", 2)]
    lost = restarted(make, run)
    assert len(lost.ledger.commit(1, batch)[0]) == 2
    made = restarted(make, lost, batch)
    assert made.ledger.commit(1, batch) == ([], [])
    with pytest.raises(ProtocolError, match="commit of version 1 after version 1"):
        made.ledger.commit(1, batch[::-1])

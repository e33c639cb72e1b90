"""Membership by heartbeats, and what paces a run."""

from __future__ import annotations

import pytest

from protocol.messages import Hello
from services.broker.roster import Roster
from shared.account import BUCKETS


def hello(instance, address=None):
    service = instance.rpartition("-")[0] or instance
    return Hello(service=service, stage=None, instance=instance, host="h", pid=1, address=address)


@pytest.fixture
def roster():
    roster = Roster(heartbeat_s=2.0)
    for instance in ("learner", "rollout-0", "rollout-1"):
        roster.join(hello(instance), 0.0)
    return roster


def test_an_instance_is_silent_after_three_missed_heartbeats(roster):
    roster.beat("learner", "SERVING", -1, {}, 1.0)
    assert roster.silent(6.0) == []
    assert roster.silent(6.5) == ["rollout-0", "rollout-1"]


def test_saying_hello_again_begins_a_new_session(roster):
    before = roster.session("learner")
    roster.join(hello("learner"), 1.0)
    assert roster.session("learner") is not before


def test_what_an_instance_reported_is_kept_when_it_leaves(roster):
    roster.beat("rollout-1", "SERVING", 3, {"time": {"compute": 5.0}, "figures": {"x": 1.0}}, 1.0)
    roster.leave("rollout-1")
    roster.leave("nobody")
    assert "rollout-1" not in roster and len(roster) == 2
    (record,) = roster.departed(2.0)
    assert (record["instance"], record["time"], record["figures"]) == ("rollout-1", {"compute": 5.0}, {"x": 1.0})


def test_a_service_is_found_by_the_address_that_it_told(roster):
    assert roster.address("broadcaster") is None
    roster.join(hello("broadcaster", "tcp://1.2.3.4:5"), 0.0)
    assert roster.address("broadcaster") == "tcp://1.2.3.4:5"


@pytest.mark.parametrize(
    ("learner", "rollout", "sentence"),
    [
        ({"compute": 9.0, "groups": 1.0}, {"compute": 2.0, "room": 8.0}, "the learner: it computes 90% of its time"),
        ({"compute": 2.0, "groups": 8.0}, {"compute": 9.0, "room": 1.0}, "the rollouts: the learner waits for groups"),
        ({"compute": 5.0, "groups": 5.0}, {"compute": 5.0, "room": 5.0}, "raise max_staleness"),
        ({"compute": 5.0, "weights": 5.0}, {"compute": 9.0, "room": 1.0}, "the learner waits for rollouts to take new"),
        ({}, {"compute": 1.0}, "not known yet"),
    ],
)
def test_the_bottleneck_is_named_from_where_the_time_goes(roster, learner, rollout, sentence):
    buckets = dict.fromkeys(BUCKETS, 0.0)
    roster.beat("learner", "SERVING", -1, {"time": buckets | learner}, 1.0)
    roster.beat("rollout-0", "SERVING", 0, {"time": buckets | rollout | {"overhead": 100.0}}, 1.0)
    assert sentence in roster.bottleneck()


def test_buckets_that_a_service_does_not_name_are_empty(roster):
    roster.beat("learner", "SERVING", -1, {"time": {"compute": 1.0}}, 1.0)
    roster.beat("rollout-0", "SERVING", 0, {"time": {"compute": 1.0}}, 1.0)
    assert "the learner: it computes 100%" in roster.bottleneck()

"""What the broker shows to Prometheus of a run over real sockets."""

from __future__ import annotations

import pytest

from services.broker.page import fill
from services.page import Page
from shared.errors import ProtocolError

from .test_server import Played, cast, config_of, make_ready, running


def values(broker) -> dict[str, float]:
    """By name and labels."""
    page = Page()
    fill(page, broker.status(), tuple(broker.run_state.stages))
    return {
        " ".join([sample.name.removeprefix("stretto_"), *sample.labels.values()]): sample.value
        for family in page.families.values()
        for sample in family.samples
    }


async def test_what_waits_and_what_is_wanted_adds_up_while_groups_go_their_way(tmp_path, columns_of):
    async with running(config_of(tmp_path, rows=20, steps=6, max_staleness=1), tmp_path) as (broker, client, _):
        assert (values(broker)["groups_wanted"], values(broker)["groups_ready"]) == (4, 0)
        rollout, reward, learner = await cast(client, columns_of)
        leases = await rollout.lease(3)
        found = values(broker)
        assert (found["groups_leased train rollout"], found["groups_wanted"], found["members rollout serving"]) == (
            3,
            4,
            1,
        )
        for lease, _ in leases:
            await rollout.complete(lease)
        assert (values(broker)["groups_queued train reward"], values(broker)["groups_wanted"]) == (3, 1)
        for lease, _ in await reward.lease():
            await reward.complete(lease)
        found = values(broker)
        assert (found["groups_ready"], found["groups_queued train learner"], found["groups_queued train reward"]) == (
            3,
            3,
            0,
        )
        await learner.commit(1, await learner.lease(2, min_groups=2), {"time/update_s": 0.5, "kl": 0.01})
        found = values(broker)
        assert (found["policy_version"], found["groups_consumed train"], found["groups_ready"]) == (1, 2, 1)
        assert (found["groups_wanted"], found["groups_admitted train"]) == (3, 3)
        assert (found["step_time_update_seconds"], found["step_kl"], found["step_signal exact"]) == (0.5, 0.01, 1.0)
        assert broker.ailment() is None and found["state running"] == 1
        broker.run_state.drain("stopped", "enough")
        found = values(broker)
        assert (found["groups_wanted"], found["state draining"], found["state running"]) == (0, 1, 0)
        assert broker.ailment() == "draining: the learner saves"


async def test_what_was_replaced_refused_and_evaluated_is_shown(tmp_path, columns_of):
    config = config_of(tmp_path, rows=20, heldout=2, steps=6, replace_equal=1)
    async with running(config, tmp_path) as (broker, client, _):
        rollout, reward, _ = await cast(client, columns_of)
        with pytest.raises(ProtocolError, match="not_member"):
            await Played(client, "rollout", columns_of, "stranger").beat()
        await make_ready(rollout, reward)
        await make_ready(rollout, reward)
        found = values(broker)
        assert (found["refused_messages_total not_member"], found["groups_dropped train equal rewards"]) == (1, 2)
        assert (found["evaluation_version"], found["evaluation_accuracy"], found["evaluation_reward"]) == (0, 1, 1)

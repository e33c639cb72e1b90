"""The broker over real sockets, with services played by the test."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest

from protocol.channel import Client
from protocol.codec import part_groups
from protocol.events import EventSubscriber
from protocol.messages import (
    Checkpointed,
    Commit,
    Complete,
    DeadLetters,
    DeadLettersRequest,
    Drain,
    Fail,
    Heartbeat,
    Hello,
    Leased,
    LeaseRequest,
    Leave,
    Locate,
    Located,
    Ok,
    Pulse,
    Requeue,
    Requeued,
    Resume,
    Resumed,
    Status,
    StatusRequest,
    Welcome,
)
from services.broker import server
from services.broker.server import Broker
from shared.config import parse_config
from shared.errors import ConfigError, DataError, ProtocolError, RunStopped

LONG_S = 30.0


def config_of(folder, *, rows=8, heldout=0, **settings):
    """A run of 2 prompts with 2 samples a step."""
    data = {}
    for name, count in (("train", rows), ("heldout", heldout)):
        if count:
            file = folder / f"{name}.jsonl"
            file.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) + "\n" for i in range(count)))
            data[name] = str(file)
    tree = {
        "model": "none",
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "steps": 2,
        "data": data,
        "reward": {"signals": [{"name": "exact", "function": "exact_match"}]},
        "evaluation": {"every": 1, "prompts": 2},
    }
    return parse_config(tree | settings)


@asynccontextmanager
async def running(config, folder):
    """A broker; at the end its run is drained if it still goes."""
    broker = Broker(config, folder / "run")
    task = asyncio.create_task(broker.run())
    client = Client(broker.address)
    try:
        yield broker, client, task
    finally:
        if not task.done():
            await client.request(Drain(reason="the test is over"), Ok)
        for member in broker.status()["services"]:
            if not task.done():
                await client.request(Leave(instance=member["instance"]), Ok)
        await asyncio.wait([task], timeout=LONG_S)
        await client.close()
        assert task.done()


class Played:
    """A service whose every step the test decides."""

    def __init__(self, client, service, columns_of, instance=None):
        self.client = client
        self.service = service
        self.instance = instance or f"{service}-0"
        self.columns_of = columns_of

    async def join(self, address=None):
        hello = Hello(
            service=self.service, stage=self.service, instance=self.instance, host="h", pid=1, address=address
        )
        return (await self.client.request(hello, Welcome))[0]

    async def beat(self, version=-1, **stats):
        beat = Heartbeat(instance=self.instance, state="SERVING", version=version, stats=stats)
        return (await self.client.request(beat, Pulse))[0]

    async def lease(self, n=10, *, min_groups=1, wait_s=LONG_S):
        request = LeaseRequest(
            instance=self.instance,
            stage=self.service,
            max_groups=n,
            min_groups=min_groups,
            wait_ms=int(wait_s * 1000),
        )
        leased, columns = await self.client.request(request, Leased, wait_s=wait_s)
        return list(zip(leased.leases, part_groups(columns, len(leased.leases)), strict=True))

    async def complete(self, lease, version=0, columns=None):
        body = Complete(lease_id=lease.lease_id, group_id=lease.group_id, attempt=lease.attempt)
        samples = 2 if lease.lane == "train" else 1
        await self.client.request(body, Ok, columns or self.columns_of(self.service, version, samples))

    async def fail(self, lease, error, *, retry=True):
        await self.client.request(Fail(lease_id=lease.lease_id, group_id=lease.group_id, error=error, retry=retry), Ok)

    async def commit(self, version, leases, metrics=None):
        ids = [lease.group_id for lease, _ in leases]
        await self.client.request(Commit(lineage=0, version=version, group_ids=ids, metrics=metrics or {}), Ok)

    async def leave(self, error=None):
        await self.client.request(Leave(instance=self.instance, error=error), Ok)


async def cast(client, columns_of):
    """A rollout with the weights of version 0, a reward and a learner, all joined."""
    played = [Played(client, service, columns_of) for service in ("rollout", "reward", "learner")]
    for service in played:
        await service.join()
    await played[0].beat(version=0)
    return played


async def make_ready(rollout, reward, version=0):
    """Generate and score what the gate admits; returns how many groups that were."""
    leases = await rollout.lease()
    for lease, _ in leases:
        await rollout.complete(lease, version)
    for lease, _ in await reward.lease():
        await reward.complete(lease)
    return len(leases)


def lines(folder, name):
    return [json.loads(line) for line in (folder / "run" / f"{name}.jsonl").read_text().splitlines()]


async def test_a_run_goes_to_its_last_version_and_writes_down_what_it_did(tmp_path, columns_of):
    async with running(config_of(tmp_path, heldout=2), tmp_path) as (_, client, task):
        rollout, reward, learner = await cast(client, columns_of)
        for version in (1, 2):
            await make_ready(rollout, reward, version - 1)
            batch = await learner.lease(2, min_groups=2)
            await learner.commit(version, batch, {"reward/mean": 1.0})
            await rollout.beat(version=version, time={"compute": 1.0}, spans=[[1.0, 2.0, "compute"]])
        await make_ready(rollout, reward, 2)
        assert not task.done()
        await client.request(Checkpointed(lineage=0, version=2, location="/checkpoint-2", oldest=2), Ok)
        assert (await rollout.beat(version=2)).stop_reason == "all 2 steps are done"
        for service in (rollout, reward, learner):
            await service.leave()
        await task
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    train = status["groups"]["train"]
    assert (status["state"], status["version"], status["lineage"]) == ("finished", 2, 0)
    assert (train["admitted"], train["consumed"], train["in_flight"]) == (4, 4, 0)
    assert [record["version"] for record in lines(tmp_path, "metrics")] == [1, 2]
    assert [result["version"] for result in lines(tmp_path, "evaluations")] == [0, 1, 2]
    assert [result["accuracy"] for result in lines(tmp_path, "evaluations")] == [1.0] * 3
    assert len(lines(tmp_path, "spans")) == 2
    samples = [record for record in lines(tmp_path, "samples") if record["lane"] == "train"]
    assert [record["version"] for record in samples] == [1, 1, 2, 2]
    assert samples[0]["texts"] == ["42", "42"] and samples[0]["rewards"] == [1.0, 1.0]
    assert samples[0]["signals"] == {"exact": [1.0, 1.0]} and samples[0]["finish"] == ["stop", "stop"]


async def test_a_service_gets_the_run_and_its_config_from_the_welcome(tmp_path, columns_of):
    config = config_of(tmp_path)
    async with running(config, tmp_path) as (_, client, _):
        welcome = await Played(client, "reward", columns_of).join()
        assert parse_config(welcome.config) == config
        assert (welcome.total_steps, welcome.version) == (2, 0)
        assert welcome.run_folder == str(tmp_path / "run")


async def test_a_stage_gets_only_the_columns_it_needs(tmp_path, columns_of):
    async with running(config_of(tmp_path), tmp_path) as (_, client, _):
        rollout, reward, _ = await cast(client, columns_of)
        lease, columns = (await rollout.lease(1))[0]
        assert columns == {} and lease.prompt["fields"] in [{"answer": str(i)} for i in range(8)]
        await rollout.complete(lease)
        _, columns = (await reward.lease())[0]
        assert set(columns) == {"text", "text_offsets", "tokens_offsets", "finish_reasons"}


async def test_a_rollout_that_waits_gets_groups_as_soon_as_it_holds_their_version(tmp_path, columns_of):
    async with running(config_of(tmp_path, max_staleness=0), tmp_path) as (_, client, _):
        rollout, reward, learner = await cast(client, columns_of)
        await make_ready(rollout, reward)
        waiting = asyncio.create_task(rollout.lease())
        await learner.commit(1, await learner.lease(2, min_groups=2))
        await client.request(StatusRequest(), Status)
        assert not waiting.done()
        await rollout.beat(version=1)
        assert [lease.min_version for lease, _ in await waiting] == [1, 1]


async def test_several_rollouts_share_what_the_gate_admits(tmp_path, columns_of):
    async with running(config_of(tmp_path, max_staleness=1), tmp_path) as (_, client, _):
        rollout, _, _ = await cast(client, columns_of)
        second = Played(client, "rollout", columns_of, "rollout-1")
        await second.join()
        await second.beat(version=0)
        assert [len(await rollout.lease()), len(await second.lease())] == [2, 1]


async def test_what_breaks_the_rules_is_refused_and_the_run_goes_on(tmp_path, columns_of):
    async with running(config_of(tmp_path), tmp_path) as (_, client, _):
        rollout, *_ = await cast(client, columns_of)
        lease, _ = (await rollout.lease(1))[0]
        columns = columns_of("rollout")
        for wrong in ({"versions": columns["versions"]}, columns | {"tokens": np.array(1, dtype="i4")}, {}):
            with pytest.raises(ProtocolError, match="bad_column"):
                await rollout.client.request(
                    Complete(lease_id=lease.lease_id, group_id=lease.group_id, attempt=1),
                    Ok,
                    wrong or {"x": columns["tokens"]},
                )
        for stats in ({"time": 3}, {"figures": {"x": "much"}}, {"spans": [1]}, {"spans": [[1.0, None, "compute"]]}):
            with pytest.raises(ProtocolError, match="bad_header"):
                await rollout.beat(**stats)
        with pytest.raises(ProtocolError, match="there is no stage 'dream'"):
            await client.request(LeaseRequest(instance="rollout-0", stage="dream", max_groups=1, wait_ms=0), Leased)
        with pytest.raises(ProtocolError, match="unknown_type"):
            await client.request(Ok(), Ok)
        with pytest.raises(ProtocolError, match="not_member"):
            await Played(client, "rollout", columns_of, "stranger").beat()
        await rollout.complete(lease)
        status = (await client.request(StatusRequest(), Status))[0].status
        assert status["refused_messages"] == {"bad_column": 3, "bad_header": 5, "unknown_type": 1, "not_member": 1}


async def test_metrics_cannot_displace_the_version_of_their_record(tmp_path, columns_of):
    async with running(config_of(tmp_path), tmp_path) as (_, client, _):
        rollout, reward, learner = await cast(client, columns_of)
        await make_ready(rollout, reward)
        await learner.commit(1, await learner.lease(2, min_groups=2), {"version": 9.0, "file": 1.0})
    assert lines(tmp_path, "metrics")[0]["version"] == 1


async def test_the_status_warns_of_drift_once(tmp_path, columns_of):
    drift = {"drift/fresh/mean": 0.3, "drift/fresh/max": 1.0, "drift/fresh/k3": 0.1, "drift/fresh/tokens": 9.0}
    drift["drift/fresh/lag"] = 0.0
    config = config_of(tmp_path, learner={"drift_warn": 0.2})
    async with running(config, tmp_path) as (broker, client, _):
        rollout, reward, learner = await cast(client, columns_of)
        assert await make_ready(rollout, reward) == 4
        for version in (1, 2):
            await learner.commit(version, await learner.lease(2, min_groups=2), drift)
        [warning] = broker.status()["warnings"]
    assert warning.startswith("the engine's log-probs of 9 tokens that it sampled with version 0 differ")
    assert "0.3 nats on average" in warning and "above learner.drift_warn (0.2)" in warning


async def test_a_request_of_a_process_that_was_started_again_is_given_nothing(tmp_path, columns_of):
    async with running(config_of(tmp_path), tmp_path) as (_, client, _):
        rollout, reward, _ = await cast(client, columns_of)
        before = asyncio.create_task(reward.lease())
        await client.request(StatusRequest(), Status)
        await reward.join()
        assert await before == []
        await rollout.complete((await rollout.lease(1))[0][0])
        assert len(await reward.lease()) == 1


async def test_leases_of_a_process_that_was_started_again_go_back(tmp_path, columns_of):
    async with running(config_of(tmp_path), tmp_path) as (_, client, _):
        rollout, *_ = await cast(client, columns_of)
        first, _ = (await rollout.lease(1))[0]
        await rollout.join()
        await rollout.beat(version=0)
        second, _ = (await rollout.lease(1))[0]
        assert (second.group_id, second.attempt) == (first.group_id, 2)


async def test_a_lease_asked_for_before_hello_waits_for_it(tmp_path, columns_of):
    async with running(config_of(tmp_path), tmp_path) as (_, client, _):
        rollout = Played(client, "rollout", columns_of)
        asked = asyncio.create_task(rollout.lease())
        await client.request(StatusRequest(), Status)
        assert not asked.done()
        await rollout.join()
        assert await asked == []


async def test_who_is_not_heard_of_loses_its_leases(tmp_path, columns_of):
    config = config_of(tmp_path, broker={"heartbeat_s": 0.5})
    async with running(config, tmp_path) as (_, client, _):
        rollout, *_ = await cast(client, columns_of)
        second = Played(client, "rollout", columns_of, "rollout-1")
        lost, _ = (await rollout.lease(1))[0]
        await second.join()
        await second.beat(version=0)

        async def keep_alive():
            while True:
                await second.beat(version=0)
                await asyncio.sleep(0.05)

        alive = asyncio.create_task(keep_alive())
        found = []
        while lost.group_id not in found:
            found += [lease.group_id for lease, _ in await second.lease(1)]
        broadcaster = Played(client, "broadcaster", columns_of)
        await broadcaster.join()
        assert "rollout-0" in (await broadcaster.beat()).gone
        await rollout.join()
        assert "rollout-0" not in (await broadcaster.beat()).gone
        assert (await rollout.beat()).gone == []
        await client.request(Leave(instance="rollout-0"), Ok)
        await client.request(Leave(instance="broadcaster-0"), Ok)
        alive.cancel()
        status = (await client.request(StatusRequest(), Status))[0].status
        assert [member["instance"] for member in status["services"]] == ["rollout-1"]
        assert "rollout-0 was not heard of any more" in status["warnings"]


async def test_the_learner_is_told_of_a_drain_and_the_run_ends_once_it_has_saved(tmp_path, columns_of):
    async with running(config_of(tmp_path), tmp_path) as (_, client, task):
        rollout, reward, learner = await cast(client, columns_of)
        await make_ready(rollout, reward)
        await learner.commit(1, await learner.lease(2, min_groups=2))
        waiting = asyncio.create_task(learner.lease(2, min_groups=2))
        await client.request(Drain(reason="enough"), Ok)
        with pytest.raises(ProtocolError, match="draining"):
            await waiting
        pulse = await learner.beat()
        assert pulse.draining and pulse.stop_reason is None
        await client.request(Checkpointed(lineage=0, version=1, location="/checkpoint-1", oldest=1), Ok)
        assert (await learner.beat()).stop_reason == "enough"
        for service in ("rollout-0", "reward-0", "learner-0"):
            await client.request(Leave(instance=service), Ok)
        await task
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "stopped"


async def test_a_run_that_has_trained_nothing_ends_at_once_when_it_is_drained(tmp_path, columns_of):
    async with running(config_of(tmp_path), tmp_path) as (_, client, _):
        _, _, learner = await cast(client, columns_of)
        waiting = asyncio.create_task(learner.lease(2, min_groups=2))
        await client.request(Drain(reason="enough"), Ok)
        with pytest.raises(ProtocolError, match="draining"):
            await waiting
        assert (await learner.beat()).stop_reason == "enough"


async def test_a_draining_run_admits_nothing(tmp_path, columns_of):
    async with running(config_of(tmp_path), tmp_path) as (broker, client, _):
        rollout, reward, learner = await cast(client, columns_of)
        await make_ready(rollout, reward)
        await learner.commit(1, await learner.lease(2, min_groups=2))
        await rollout.beat(version=1)
        before = broker.status()["groups"]["train"]["admitted"]
        await client.request(Drain(reason="enough"), Ok)
        assert broker.run_state.state == "draining"
        assert await rollout.lease(wait_s=0.0) == []
        assert broker.status()["groups"]["train"]["admitted"] == before


async def test_a_fault_of_every_group_stops_the_run_with_its_words(tmp_path, columns_of):
    config = config_of(tmp_path, broker={"dead_letter_limit": 2})
    async with running(config, tmp_path) as (_, client, task):
        rollout, *_ = await cast(client, columns_of)
        for lease, _ in await rollout.lease(2):
            await rollout.fail(lease, "out of memory", retry=False)
        assert "2 groups in a row failed at the stage rollout; the last: out of memory" in (
            (await rollout.beat()).stop_reason
        )
        for service in ("rollout-0", "reward-0", "learner-0"):
            await client.request(Leave(instance=service), Ok)
        with pytest.raises(RunStopped, match="out of memory"):
            await task
    assert [letter["errors"] for letter in lines(tmp_path, "dead_letters")] == [["out of memory"]] * 2


async def test_a_run_without_progress_names_the_stage_of_costs_where_it_has_one(tmp_path):
    config = config_of(
        tmp_path,
        algorithm="safe_rlhf",
        cost={"signals": [{"name": "harm", "function": "length"}]},
        broker={"progress_s": 0.05, "heartbeat_s": 0.05},
    )
    async with running(config, tmp_path) as (_, _, task):
        with pytest.raises(RunStopped, match=r"no rollout and no reward and no cost and .* and no learner"):
            await task


async def test_a_run_without_progress_stops_and_names_who_is_missing(tmp_path):
    config = config_of(tmp_path, broker={"progress_s": 0.05, "heartbeat_s": 0.05})
    async with running(config, tmp_path) as (_, _, task):
        with pytest.raises(RunStopped, match="no rollout and no reward and no learner and no broadcaster is there"):
            await task


async def test_versions_are_evaluated_also_when_no_rollout_asks_meanwhile(tmp_path, columns_of):
    async with running(config_of(tmp_path, heldout=1, steps=4), tmp_path) as (_, client, _):
        rollout, reward, learner = await cast(client, columns_of)
        await make_ready(rollout, reward)
        for version in (1, 2):
            await learner.commit(version, await learner.lease(2, min_groups=2))
        await rollout.beat(version=2)
        await make_ready(rollout, reward, 2)
    assert [result["version"] for result in lines(tmp_path, "evaluations")] == [0, 1, 2]


async def test_a_resumed_run_goes_on_with_the_prompts_after_those_it_had(tmp_path, columns_of):
    config = config_of(tmp_path, data={"train": str(tmp_path / "train.jsonl"), "shuffle": False}, steps=4)
    async with running(config, tmp_path) as (_, client, _):
        rollout, _, learner = await cast(client, columns_of)
        resumed, _ = await client.request(Resume(version=2, location="/checkpoint-2"), Resumed)
        await rollout.beat(version=2)
        rows = [lease.prompt["row"] for lease, _ in await rollout.lease(2)]
        assert (resumed.lineage, rows) == (1, [4, 5])
        await client.request(Drain(reason="enough"), Ok)
        assert (await learner.beat()).stop_reason == "enough"


async def test_locate_waits_for_the_service_to_come(tmp_path, columns_of):
    async with running(config_of(tmp_path), tmp_path) as (_, client, _):
        none, _ = await client.request(Locate(service="broadcaster", wait_ms=0), Located)
        asked = asyncio.create_task(client.request(Locate(service="broadcaster", wait_ms=30_000), Located, wait_s=30))
        await Played(client, "broadcaster", columns_of).join("tcp://1.2.3.4:5")
        assert (none.address, (await asked)[0].address) == (None, "tcp://1.2.3.4:5")


async def test_status_can_wait_for_a_version(tmp_path, columns_of):
    async with running(config_of(tmp_path), tmp_path) as (_, client, _):
        rollout, reward, learner = await cast(client, columns_of)
        asked = asyncio.create_task(client.request(StatusRequest(wait_version=1, wait_ms=30_000), Status, wait_s=30))
        await make_ready(rollout, reward)
        await learner.commit(1, await learner.lease(2, min_groups=2))
        assert (await asked)[0].status["version"] == 1


async def test_a_new_version_is_published_as_an_event(tmp_path, columns_of):
    async with running(config_of(tmp_path), tmp_path) as (_, client, _):
        rollout, reward, learner = await cast(client, columns_of)
        address = (await learner.join()).events_address
        subscriber = EventSubscriber()
        subscriber.connect(address)
        events = subscriber.events()
        first = asyncio.create_task(anext(events))
        await make_ready(rollout, reward)
        version = 0
        while not first.done():  # a subscription takes effect some time after it was made
            version += 1
            if version <= 2:
                await learner.commit(version, await learner.lease(2, min_groups=2))
            else:
                await client.request(Drain(reason="enough"), Ok)
            await asyncio.wait([first], timeout=0.2)
        assert (await first).kind in ("version", "drain")
        await events.aclose()
        subscriber.close()


async def test_a_port_in_use_is_one_clear_error(tmp_path):
    async with running(config_of(tmp_path), tmp_path) as (broker, _, _):
        taken = config_of(tmp_path, broker={"bind": broker.address})
        with pytest.raises(ConfigError, match=r"is in use: stop the other program or choose another port"):
            Broker(taken, tmp_path / "other")


async def test_too_few_rows_for_one_step_are_one_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"has 1 rows; in 1 epochs that is not one step of 2 prompts"):
        Broker(config_of(tmp_path, rows=1, steps=None, epochs=1), tmp_path / "run")


async def test_services_that_do_not_say_goodbye_are_not_waited_for_long(tmp_path, columns_of, monkeypatch):
    monkeypatch.setattr(server, "GOODBYE_S", 0.05)
    async with running(config_of(tmp_path), tmp_path) as (_, client, task):
        rollout = Played(client, "rollout", columns_of)
        await rollout.join()
        await client.request(Drain(reason="enough"), Ok)
        await asyncio.wait_for(task, LONG_S)


async def test_serve_tells_the_address_once_it_listens(tmp_path):
    told = asyncio.Queue()
    task = asyncio.create_task(
        server.serve(config_of(tmp_path), tmp_path / "run", on_bound=lambda *told_: told.put_nowait(told_[0]))
    )
    client = Client(await told.get())
    await client.request(Drain(reason="enough"), Ok)
    await task
    await client.close()


async def test_a_group_of_equal_rewards_is_replaced_by_the_next_prompt_and_written_down(tmp_path, columns_of):
    async with running(config_of(tmp_path, steps=1, replace_equal=1), tmp_path) as (_, client, _):
        rollout, reward, learner = await cast(client, columns_of)
        rows = []
        for rewards in ([1, 1], [0, 1], [0, 1]):
            for lease, _ in await rollout.lease(1):
                rows.append(lease.prompt["row"])
                await rollout.complete(lease)
            for lease, _ in await reward.lease():
                columns = columns_of("reward", 0, 2) | {"rewards": np.array(rewards, dtype="f4")}
                await reward.complete(lease, columns=columns)
        await learner.commit(1, await learner.lease(2, min_groups=2))
    assert len(set(rows)) == 3
    [metrics] = lines(tmp_path, "metrics")
    assert metrics["replaced/groups"] == 1 and metrics["reward/generated"] == pytest.approx(4 / 6)
    assert [record["version"] for record in lines(tmp_path, "samples")] == [None, 1, 1]


# A broker that goes on with its journal


@pytest.fixture
def killed(free_again):
    """A broker that ends as by a kill: nothing is said, written or waited for."""
    return asynccontextmanager(partial(_killed, free_again))


async def _killed(free_again, config, folder):
    broker = Broker(config, folder / "run")
    task = asyncio.create_task(broker.run())
    client = Client(broker.address)
    try:
        yield broker, client
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        broker._events.close()
        broker.run_state.close()
        await client.close()
        await free_again(broker.address)


async def test_a_broker_that_starts_again_goes_on_where_it_was(tmp_path, columns_of, killed):
    config = config_of(tmp_path, max_staleness=1, steps=3)
    async with killed(config, tmp_path) as (first, client):
        rollout, reward, learner = await cast(client, columns_of)
        await make_ready(rollout, reward)
        await learner.commit(1, await learner.lease(2, min_groups=2))
        await rollout.beat(version=1)
        unfinished, _ = (await rollout.lease(1))[0]
        address, run_id = first.address, first.run_state.run_id
        before = first.status()["groups"]["train"]
    async with running(config, tmp_path) as (second, client, _):
        assert (second.address, second.run_state.run_id) == (address, run_id)
        status = second.status()
        assert (status["version"], status["lineage"]) == (1, 0)
        assert [record["version"] for record in status["history"]] == [1]
        after = status["groups"]["train"]
        assert {k: after[k] for k in ("admitted", "consumed", "in_flight")} == {
            k: before[k] for k in ("admitted", "consumed", "in_flight")
        }
        assert after["queued"] == {"learner": 2, "rollout": before["in_flight"] - 2}
        rollout, reward, learner = await cast(client, columns_of)
        await rollout.complete(unfinished, 1)
        await learner.commit(2, await learner.lease(2, min_groups=2))
        await rollout.beat(version=2)
        await make_ready(rollout, reward, 2)
        await learner.commit(3, await learner.lease(2, min_groups=2))
    samples = lines(tmp_path, "samples")
    assert [record["version"] for record in samples] == [1, 1, 2, 2, 3, 3]
    assert len({record["row"] for record in samples}) == 6


async def test_a_learner_that_starts_again_gets_what_followed_its_checkpoint_in_order(tmp_path, columns_of, killed):
    config = config_of(tmp_path, rows=20, max_staleness=2, steps=6)
    batches = {}
    async with killed(config, tmp_path) as (_, client):
        rollout, reward, learner = await cast(client, columns_of)
        for version in (1, 2, 3):
            await rollout.beat(version=version - 1)
            await make_ready(rollout, reward, version - 1)
            batches[version] = await learner.lease(2, min_groups=2)
            await learner.commit(version, batches[version])
            if version == 1:
                await client.request(Checkpointed(lineage=0, version=1, location="/c", oldest=1), Ok)
    async with running(config, tmp_path) as (broker, client, _):
        learner = Played(client, "learner", columns_of)
        assert (await learner.join()).version == 3
        with pytest.raises(ProtocolError, match="its journal does not reach back to the checkpoint of 0"):
            await client.request(Resume(version=0, location=""), Resumed)
        with pytest.raises(ProtocolError, match="newer than the journal, which ends at 3"):
            await client.request(Resume(version=4, location="/c4"), Resumed)
        resumed, _ = await client.request(Resume(version=1, location="/c"), Resumed)
        assert (resumed.lineage, broker.status()["version"]) == (1, 1)
        for version in (2, 3):
            again = await learner.lease(2, min_groups=2)
            assert [lease.group_id for lease, _ in again] == [lease.group_id for lease, _ in batches[version]]
            for (_, columns), (_, before) in zip(again, batches[version], strict=True):
                assert all((columns[name] == before[name]).all() for name in before)
            ids = [lease.group_id for lease, _ in again]
            await client.request(Commit(lineage=1, version=version, group_ids=ids, metrics={}), Ok)
        assert broker.status()["groups"]["train"]["consumed"] == 6
        with pytest.raises(ProtocolError, match="lineage 0; the run is at 1"):
            await learner.commit(4, [])


async def test_an_evaluation_that_a_dead_broker_had_begun_is_made_anew(tmp_path, columns_of, killed):
    config = config_of(tmp_path, heldout=2, steps=1)
    async with killed(config, tmp_path) as (_, client):
        rollout, reward, learner = await cast(client, columns_of)
        await make_ready(rollout, reward)
        await learner.commit(1, await learner.lease(2, min_groups=2))
        await client.request(Checkpointed(lineage=0, version=1, location="/c", oldest=1), Ok)
    async with running(config, tmp_path) as (_, client, _):
        rollout, reward, learner = await cast(client, columns_of)
        await rollout.beat(version=1)
        assert await make_ready(rollout, reward, 1) == 2
        assert (await learner.beat()).stop_reason == "all 1 steps are done"
    assert [result["version"] for result in lines(tmp_path, "evaluations")] == [0, 1]


async def test_dead_letters_can_be_read_and_given_back_also_by_the_next_broker(tmp_path, columns_of, killed):
    config = config_of(tmp_path, broker={"dead_letter_limit": 9})
    async with killed(config, tmp_path) as (_, client):
        rollout, *_ = await cast(client, columns_of)
        for lease, _ in await rollout.lease(2):
            await rollout.fail(lease, f"cannot read {lease.prompt['row']}", retry=False)
        await client.request(Checkpointed(lineage=0, version=0, location="/c", oldest=0), Ok)  # a flush
    async with running(config, tmp_path) as (_, client, _):
        rollout, *_ = await cast(client, columns_of)
        letters = (await client.request(DeadLettersRequest(), DeadLetters))[0].letters
        rows = [letter["row"] for letter in letters]
        assert [letter["errors"] for letter in letters] == [[f"cannot read {row}"] for row in rows]
        with pytest.raises(ProtocolError, match="no dead letter: nobody"):
            await client.request(Requeue(group_ids=["nobody"]), Requeued)
        requeued, _ = await client.request(Requeue(group_ids=None), Requeued)
        assert requeued.count == 2
        assert (await client.request(DeadLettersRequest(), DeadLetters))[0].letters == []
        assert [lease.prompt["row"] for lease, _ in await rollout.lease(2)] == rows


async def test_a_journal_that_cannot_be_written_stops_the_run_and_answers_nothing_it_did_not_keep(
    tmp_path, columns_of, monkeypatch
):
    monkeypatch.setattr(server, "GOODBYE_S", 0.05)
    config = config_of(tmp_path)
    async with running(config, tmp_path) as (broker, client, task):
        rollout, *_ = await cast(client, columns_of)
        (kept, _), (lease, _) = await rollout.lease(2)
        await rollout.complete(kept)
        (pages,) = broker.run_state.journal._connection.execute("PRAGMA page_count").fetchone()
        broker.run_state.journal._connection.execute(f"PRAGMA max_page_count = {pages}")
        columns = columns_of("rollout") | {"prompt_tokens": np.zeros(4000, dtype="i4")}
        completing = asyncio.create_task(rollout.complete(lease, columns=columns))
        with pytest.raises(RunStopped, match=r"journal .* cannot be written .*full.*make room"):
            await task
        assert not completing.done()
        completing.cancel()
    again = Broker(config, tmp_path / "run")
    assert again.status()["groups"]["train"]["queued"] == {"rollout": 1, "reward": 1}
    again._events.close()
    again.run_state.close()


def test_the_clock_stands_still_while_the_process_is_stopped(monkeypatch):
    real = [100.0]
    monkeypatch.setattr(server.time, "monotonic", lambda: real[0])
    clock = server.Clock(largest_step_s=2.0)
    real[0] += 1.5
    assert clock.now() == 1.5
    real[0] += 60.0
    assert clock.now() == 3.5

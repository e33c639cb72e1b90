"""What a service shows over HTTP, asked as Prometheus and a health check would."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.exposition import Exposition
from services.member import Member
from shared.errors import ConfigError

from .test_actor import FewLineBroker, running

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def shown(monkeypatch):
    monkeypatch.setenv("STRETTO_METRICS", "127.0.0.1:0")


async def get(exposition: Exposition, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"{exposition.address}{path}") as answer:
        return answer.status, await answer.text()


async def metrics(exposition: Exposition) -> dict[str, float]:
    """By name, and the values of all labels but those that every metric has."""
    status, text = await get(exposition, "/metrics")
    assert status == 200
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {}
    for sample in samples:
        assert (sample.labels.pop("service"), sample.labels.pop("instance")) == ("reward", "reward-0")
        found[" ".join([sample.name, *sample.labels.values()])] = sample.value
    return found


async def until(exposition: Exposition, status: int, text: str) -> None:
    """Wait until the service says so of its health."""
    async with asyncio.timeout(DEADLINE_S):
        while (found := await get(exposition, "/health"))[0] != status or text not in found[1]:
            await asyncio.sleep(0.01)


async def test_a_member_tells_its_health_and_its_figures_from_before_it_joins_until_it_leaves():
    broker = FewLineBroker(["train"])
    gate = asyncio.Event()
    welcome = broker.handle

    async def handle(message):
        await gate.wait()
        return await welcome(message)

    broker.handle = handle
    async with running(broker) as address:
        member = Member(address, "reward", "reward-0", stage="reward")
        exposition = member._exposition
        joining = asyncio.create_task(member.join())
        async with asyncio.timeout(DEADLINE_S):
            while exposition.address is None:
                await asyncio.sleep(0.01)
        assert await get(exposition, "/health") == (503, "starting: it has not joined the run\n")
        gate.set()
        await joining
        work = asyncio.create_task(member.run(asyncio.Event().wait))
        assert await get(exposition, "/health") == (503, "starting\n")
        member.state = "STALE"
        assert await get(exposition, "/health") == (503, "stale\n")
        member.state, member.holds_version = "SERVING", 3
        member.figures = {"weights/pause_s": 0.25, "samples": 5.0}
        assert await get(exposition, "/health") == (200, "ok\n")
        found = await metrics(exposition)
        assert found["stretto_state serving"] == 1 and found["stretto_state stale"] == 0
        assert (found["stretto_held_version"], found["stretto_policy_version"]) == (3, 3)
        assert (found["stretto_weights_pause_seconds"], found["stretto_reward_samples_total"]) == (0.25, 5)
        assert found["stretto_time_seconds_total overhead"] > 0
        assert 2**20 < found["stretto_memory_resident_bytes"] < 2**40
        gate.clear()  # the broker is there, and answers no more
        await until(exposition, 503, "the broker has not answered for")
        gate.set()
        await until(exposition, 200, "ok")
        broker.answers["g0"] = None  # the run is over
        await work
        with pytest.raises(aiohttp.ClientConnectionError):
            await get(exposition, "/health")


async def test_a_draining_member_is_of_no_use():
    member = Member("tcp://127.0.0.1:1", "reward", "reward-0")
    member.state, member.draining, member._heard_at = "SERVING", True, time.monotonic()
    assert member._ailment() == "draining"
    await member._client.close()


async def test_the_lag_is_what_a_blocked_event_loop_was_late():
    exposition = Exposition("reward", "reward-0", lambda page: None, lambda: None)
    await exposition.start()
    await asyncio.sleep(0)  # the timer runs
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        pass
    async with asyncio.timeout(DEADLINE_S):
        while (await metrics(exposition))["stretto_event_loop_lag_seconds"] < 0.5:
            await asyncio.sleep(0.01)
    await exposition.close()


async def test_nothing_listens_where_nobody_asked_for_it(monkeypatch):
    monkeypatch.delenv("STRETTO_METRICS")
    exposition = Exposition("reward", "reward-0", lambda page: None, lambda: None)
    await exposition.start()
    assert exposition.address is None
    await exposition.close()


async def test_a_port_that_is_taken_is_one_clear_error(monkeypatch):
    first, second = (Exposition("reward", "reward-0", lambda page: None, lambda: None) for _ in range(2))
    await first.start()
    monkeypatch.setenv("STRETTO_METRICS", first.address.removeprefix("http://"))
    with pytest.raises(ConfigError, match=r"cannot show metrics at 127.0.0.1:\d+: .*choose another metrics.port"):
        await second.start()
    await first.close()


@pytest.mark.parametrize("listen", ["9500", "localhost:", ":9500", "127.0.0.1:http", "127.0.0.1:99999"])
async def test_what_is_no_address_is_one_clear_error(monkeypatch, listen):
    monkeypatch.setenv("STRETTO_METRICS", listen)
    with pytest.raises(ConfigError, match=listen):
        await Exposition("reward", "reward-0", lambda page: None, lambda: None).start()

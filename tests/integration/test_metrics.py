"""What a real run shows to Prometheus is what docs/metrics.md lists."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import ExitStack

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from shared.config import load_config
from stretto.launcher import LocalRun, instances, metrics_address


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has, below those that the system gives out."""
    while True:
        first = random.randrange(20_000, 30_000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


async def get(address: str, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as answer:
        return answer.status, await answer.text()


async def scrape(address: str):
    status, text = await get(address, "/metrics")
    assert status == 200
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def test_every_metric_of_the_documentation_is_there_and_no_other(workplace, documented_metrics):
    config = load_config(workplace.write(steps=1_000_000, metrics={"port": free_ports(5)}), ["learner.lr=1e-6"])
    services = {instance: metrics_address(config, instance) for instance in instances(config)}
    always = {name for name, is_everywhere in documented_metrics.items() if is_everywhere}
    run = LocalRun(config, workplace.run_folder)
    await run.start()
    waiting = asyncio.create_task(run.wait())
    found: set[str] = set()
    version = 0
    async with asyncio.timeout(150):
        while not always <= found:
            version = (await run.status(wait_version=version + 1, wait_s=20.0))["version"]
            if version == 0:
                continue
            for instance, address in services.items():
                samples = await scrape(address)
                found |= {sample.name for sample in samples}
                kind = instance.removesuffix("-0")
                assert {(s.labels["service"], s.labels["instance"]) for s in samples} == {(kind, instance)}
        for address in services.values():
            assert await get(address, "/health") == (200, "ok\n")
        train = {s.name: s.value for s in await scrape(services["broker"]) if s.labels.get("lane") == "train"}
        await run.drain("enough")
        await waiting
    assert found <= set(documented_metrics)
    rest = sum(train[f"stretto_groups_{name}"] for name in ("consumed", "dead", "in_flight"))
    assert train["stretto_groups_admitted"] == rest > 0

"""Weights for rollouts that cannot read the learner's shared memory: streams, collective rounds, deltas, and faults."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

import services.rollout.snapshots as snapshots_module
from protocol.channel import Client, Server
from protocol.messages import Bucket, Fetch, Follow, Join, Leave, Offer, Ok
from services.broadcaster.rounds import MOST_FAILURES as MOST_FAILED_GROUPS
from services.broadcaster.service import Broadcaster
from services.learner.slots import Slots
from services.rollout.receiver import MOST_FAILURES
from services.rollout.snapshots import Snapshots
from shared.config import Weights
from shared.errors import ProtocolError, WeightsError
from shared.snapshot import Layout

from .test_weights import weight_path

POLL_MS = 10_000


class Learner:
    """Publishes snapshots of random weights, of which each version changes a few."""

    def __init__(self, address, n=200_000, dtype="bfloat16"):
        self.layout = Layout.of({"a": (n,), "b": (3, 5)}, dtype)
        self.slots = Slots(address, "test", self.layout, Weights(bucket_mib=1), patience_s=10.0)
        self.weights = torch.randn(n, generator=torch.Generator().manual_seed(0)) * 0.02
        self.version = -1

    async def publish(self, changed=0.02, lineage=0):
        self.version += 1
        tensors = await self.slots.acquire(lineage, self.version)
        generator = torch.Generator().manual_seed(self.version)
        moved = torch.rand(self.weights.shape, generator=generator) < changed
        self.weights = torch.where(moved, self.weights * 1.01, self.weights)
        tensors["a"].copy_(self.weights)
        assert await self.slots.publish(lineage, self.version, self.slots.manifest([1, 2], [-1.0]))


class Rollout:
    """Follows without an engine."""

    def __init__(self, address, name, transport, progress_s):
        self.name = name
        self.snapshots = Snapshots(address, name, Weights(transport=transport, progress_s=progress_s), patience_s=10.0)
        self.version, self.weights = -1, None

    async def follow(self):
        """Take one offer; whether it arrived."""
        found = await self.snapshots.next()
        if found is None:
            return False
        self.snapshots.in_use = found
        self.version, self.weights = found.version, found.file.tensors(found.slot)["a"].clone()
        return True

    async def reach(self, version):
        async with asyncio.timeout(30):
            while self.version < version:
                await self.follow()


class Hall:
    """A broadcaster, its learner, and rollouts. client: to ask as anybody."""

    def __init__(self, address, broadcaster, progress_s):
        self.address, self.broadcaster, self.progress_s = address, broadcaster, progress_s
        self.client = Client(address, peer="broadcaster")
        self.learner = Learner(address)
        self.rollouts = []

    def rollout(self, transport):
        self.rollouts.append(Rollout(self.address, f"rollout-{len(self.rollouts)}", transport, self.progress_s))
        return self.rollouts[-1]

    @property
    def rounds(self):
        return self.broadcaster.rounds

    @property
    def figures(self):
        return self.broadcaster.figures

    async def offered(self, name, version):
        """What a rollout that holds a version is offered."""
        request = Follow(
            instance=name, path=None, slot=None, lineage=0, version=version, wait_ms=POLL_MS, transports=["gloo"]
        )
        return (await self.client.request(request, Offer, wait_s=10))[0]

    async def counted(self, figure, times):
        """Wait until the broadcaster, which counts a round after its members have it, counted that many."""
        async with asyncio.timeout(10):
            while self.figures[figure] < times:
                await asyncio.sleep(0.001)
        assert self.figures[figure] == times

    async def start_together(self, *following):
        """Publish once all of these wait for it."""
        tasks = [asyncio.ensure_future(work) for work in following]
        while len(self.rounds._waiting) < len(tasks):
            await asyncio.sleep(0)
        await self.learner.publish(changed=1.0)
        return tasks


@asynccontextmanager
async def hall(tmp_path, monkeypatch, progress_s=2.0, **weights):
    monkeypatch.setenv("STRETTO_SHM", str(tmp_path))
    broadcaster = Broadcaster(Weights(progress_s=progress_s, **weights))
    server = Server("tcp://127.0.0.1:0", broadcaster.handle)
    tasks = [asyncio.create_task(part) for part in (server.run(), broadcaster.rounds.run())]
    place = Hall(server.address, broadcaster, progress_s)
    try:
        yield place
    finally:
        for rollout in place.rollouts:
            await rollout.snapshots.close()
        await place.learner.slots.close()
        await place.client.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_right(place, *rollouts):
    return all(torch.equal(rollout.weights, place.learner.weights.bfloat16()) for rollout in rollouts)


def received_bytes(rollout):
    return rollout.snapshots.figures["weights/received_mib"] * 2**20


@pytest.mark.parametrize("transport", ["stream", "gloo"])
@pytest.mark.parametrize("changed", [0.0, 0.02, 1.0])
async def test_every_version_arrives_bit_by_bit(tmp_path, monkeypatch, transport, changed):
    async with hall(tmp_path, monkeypatch, progress_s=10.0) as place:
        rollouts = [place.rollout(transport) for _ in range(2)]
        for version in range(4):
            await place.learner.publish(changed)
            await asyncio.gather(*(rollout.reach(version) for rollout in rollouts))
            assert is_right(place, *rollouts)
        await place.counted("weights/rounds", 3 if transport == "gloo" else 0)


@pytest.mark.parametrize("transport", ["stream", "gloo"])
async def test_only_what_changed_is_sent(tmp_path, monkeypatch, transport):
    async with hall(tmp_path, monkeypatch) as place:
        rollout = place.rollout(transport)
        received = []
        for version in range(3):
            await place.learner.publish(0.02)
            await rollout.reach(version)
            received.append(received_bytes(rollout))
        assert received[0] == place.learner.layout.size_bytes
        assert max(received[1:]) < 0.05 * received[0]


@pytest.mark.parametrize("transport", ["stream", "gloo"])
async def test_without_deltas_all_is_sent(tmp_path, monkeypatch, transport):
    async with hall(tmp_path, monkeypatch, deltas=False) as place:
        rollout = place.rollout(transport)
        for version in range(2):
            await place.learner.publish(0.02)
            await rollout.reach(version)
            assert received_bytes(rollout) == place.learner.layout.size_bytes


async def test_a_stream_goes_on_where_the_base_is_overwritten(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        rollout = place.rollout("stream")
        await place.learner.publish()
        await rollout.reach(0)
        await place.client.request(Leave(instance=rollout.name), Ok)  # or the slot that it had would be held for it
        for _ in range(5):
            await place.learner.publish()
        await rollout.reach(5)
        assert is_right(place, rollout)
        assert received_bytes(rollout) == place.learner.layout.size_bytes


async def test_a_newcomer_gets_a_stream_and_takes_part_in_the_next_round(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        old, new = place.rollout("gloo"), place.rollout("gloo")
        await place.learner.publish()
        await old.reach(0)
        assert place.figures["weights/rounds"] == 0
        await asyncio.gather(*await place.start_together(old.reach(1)))
        assert place.rounds._group_members == [old.name] and place.rounds._made == 1
        await new.reach(1)
        await place.counted("weights/rounds", 1)
        for version in (2, 3):
            await asyncio.gather(*await place.start_together(old.reach(version), new.reach(version)))
            assert place.rounds._group_members == [old.name, new.name]
        assert place.rounds._made == 2  # the group is made once
        assert is_right(place, old, new)


async def test_a_member_that_started_again_gets_a_new_group(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        members = [place.rollout("gloo") for _ in range(2)]
        await place.learner.publish()
        await asyncio.gather(*(member.reach(0) for member in members))
        await asyncio.gather(*await place.start_together(*(member.reach(1) for member in members)))
        again = Rollout(place.address, members.pop().name, "gloo", place.progress_s)
        members.append(again)
        place.rollouts.append(again)
        await again.reach(1)  # by a stream; the group has members of the same names and versions now
        await asyncio.gather(*await place.start_together(*(member.reach(2) for member in members)))
        assert place.figures["weights/broken_rounds"] == 0 and place.rounds._made == 2
        assert is_right(place, *members)


async def test_a_member_that_does_not_join_costs_the_others_one_deadline(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        members = [place.rollout("gloo") for _ in range(2)]
        await place.learner.publish()
        await asyncio.gather(*(member.reach(0) for member in members))
        start = asyncio.get_running_loop().time()
        silent, *others = await place.start_together(place.offered("silent", 0), *(m.follow() for m in members))
        assert await asyncio.gather(*others) == [False, False]
        await asyncio.gather(*(member.reach(1) for member in members))
        assert asyncio.get_running_loop().time() - start < place.progress_s + 2.0
        assert (await silent).round.size == 4
        await place.counted("weights/broken_rounds", 1)
        assert place.rounds._group_members == [member.name for member in members]
        assert is_right(place, *members)


async def test_a_member_that_falls_silent_in_a_transfer_costs_the_others_one_deadline(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        members = [place.rollout("gloo") for _ in range(2)]
        await place.learner.publish()
        await asyncio.gather(*(member.reach(0) for member in members))
        start = asyncio.get_running_loop().time()
        silent, *others = await place.start_together(place.offered("silent", 0), *(m.follow() for m in members))
        join = Join(
            instance="silent",
            epoch=(await silent).round.epoch,
            lineage=0,
            version=1,
            size_bytes=place.learner.layout.size_bytes,
        )
        await place.client.request(join, Ok, wait_s=5.0)  # and never receives
        await asyncio.gather(*others)
        await asyncio.gather(*(member.reach(1) for member in members))
        assert asyncio.get_running_loop().time() - start < place.progress_s + 2.0
        assert is_right(place, *members)


async def test_a_member_of_another_size_is_not_let_in(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        await place.learner.publish()
        offer = await place.offered("rollout-0", -1)
        join = Join(instance="rollout-0", epoch=offer.round.epoch, lineage=0, version=0, size_bytes=4096)
        with pytest.raises(ProtocolError, match="aborted: 4096 bytes instead of"):
            await place.client.request(join, Ok)


async def test_rollouts_whose_group_cannot_be_made_get_streams(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch, progress_s=0.5) as place:
        rollout = place.rollout("gloo")
        rollout.snapshots._receiver._host = "127.0.0.2"  # nothing listens there
        for version in range(2):
            await place.learner.publish()
            await rollout.reach(version)
        assert place.figures["weights/rounds"] == 0 and place.figures["weights/broken_rounds"] == MOST_FAILED_GROUPS
        assert is_right(place, rollout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL may work here")
async def test_without_nccl_its_rollouts_get_streams(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch, transport="nccl") as place:
        rollout = place.rollout("nccl")
        for version in range(2):
            await place.learner.publish()
            await rollout.reach(version)
        assert place.figures["weights/rounds"] == 0 and place.figures["weights/broken_rounds"] == MOST_FAILED_GROUPS
        assert is_right(place, rollout)


async def test_a_damaged_bucket_is_never_used(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch, deltas=False) as place:
        rollout = place.rollout("stream")
        await place.learner.publish()
        place.learner.slots.file.tensors(0)["a"][7] += 1.0
        for _ in range(MOST_FAILURES - 1):
            assert not await rollout.follow()
        with pytest.raises(WeightsError, match="bucket 0 of 1 arrived damaged"):
            await rollout.follow()
        assert rollout.version == -1


async def test_a_snapshot_that_is_not_held_for_a_rollout_is_not_sent(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        await place.learner.publish()
        fetch = Fetch(instance="stranger", lineage=0, version=0, bucket=0, base_lineage=0, base_version=-1)
        with pytest.raises(ProtocolError, match="unknown_lease: version 0 is not held for stranger any more"):
            await place.client.request(fetch, Bucket)
        rollout = place.rollout("stream")
        await rollout.reach(0)
        beyond = fetch.model_copy(update={"instance": rollout.name, "bucket": 1})
        with pytest.raises(ProtocolError, match="there is no bucket 1"):
            await place.client.request(beyond, Bucket)


async def test_a_broadcaster_that_started_again_makes_a_new_group(tmp_path, monkeypatch, free_again, tiny_model):
    async with weight_path(tiny_model, tmp_path, monkeypatch, transport="gloo", progress_s=2.0) as path:
        for version in range(2):
            await asyncio.gather(path.publish(version), path.follower.first())
            while path.versions[-1:] != [version]:
                await path.follower.follow()
        await path.restart_broadcaster(free_again)
        await path.publish(2)
        while path.versions[-1] < 2:
            await path.follower.follow()
        assert path.versions == [0, 1, 2]


@pytest.mark.parametrize("transport", ["stream", "gloo"])
async def test_an_engine_computes_with_what_it_received(tiny_model, tmp_path, monkeypatch, transport):
    async with weight_path(tiny_model, tmp_path, monkeypatch, transport=transport) as path:
        for version in range(4):
            path.train(0.0001)
            await path.publish(version)
            while path.engine.version < version:
                await path.follower.follow()
            assert path.follower.figures["weights/probe_error"] == 0
            for name, parameter in path.engine.model.named_parameters():
                assert torch.equal(parameter, path.backend._model.get_parameter(name)), name
        path.follower.snapshots.check()


@pytest.mark.parametrize(
    ("is_here", "keys", "taken"), [(True, None, "shm"), (False, None, "gloo"), (False, 1, "stream")]
)
async def test_the_transport_is_chosen_by_what_can_be_reached(tiny_model, tmp_path, monkeypatch, is_here, keys, taken):
    async with weight_path(tiny_model, tmp_path, monkeypatch) as path:
        monkeypatch.setattr(snapshots_module, "is_here", lambda name: is_here)
        monkeypatch.setattr(snapshots_module, "find_keys", lambda: keys)
        for version in range(2):
            await path.publish(version)
            while path.engine.version < version:
                await path.follower.follow()
        assert path.follower.snapshots.transports()[0] == taken
        assert (path.follower.snapshots.in_use.file.path == path.publisher.slots.file.path) == is_here
        assert np.isfinite(path.follower.figures["weights/probe_error"])

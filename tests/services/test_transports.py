"""Weights for rollouts that cannot read the learner's shared memory: streams, collective rounds, deltas, and faults."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

import services.rollout.follower as follower_module
from protocol.channel import Client, Server
from protocol.messages import AcquireSlot, Bucket, Fetch, Follow, Join, Leave, Offer, Ok, Publish, Slot
from services.broadcaster.service import Broadcaster
from services.rollout.receiver import MOST_FAILURES, Receiver
from shared.config import Weights
from shared.errors import ProtocolError, WeightsError
from shared.snapshot import Layout, Manifest, SnapshotFile

from .test_weights import weight_path

POLL_MS = 10_000
BUCKET = 1 << 16


class Learner:
    """Publishes snapshots of random weights, of which each version changes a few."""

    def __init__(self, client, n=200_000, dtype="bfloat16"):
        self.client = client
        self.layout = Layout.of({"a": (n,), "b": (3, 5)}, dtype)
        self.file = SnapshotFile.create("learner", self.layout, 3)
        self.weights = torch.randn(n, generator=torch.Generator().manual_seed(0)) * 0.02
        self.version = -1

    async def publish(self, changed=0.02, lineage=0):
        self.version += 1
        request = AcquireSlot(
            path="learner", is_new=self.version == 0, lineage=lineage, version=self.version, wait_ms=POLL_MS
        )
        slot = (await self.client.request(request, Slot, wait_s=10))[0].slot
        generator = torch.Generator().manual_seed(self.version)
        moved = torch.rand(self.weights.shape, generator=generator) < changed
        self.weights = torch.where(moved, self.weights * 1.01, self.weights)
        self.file.begin(slot)
        self.file.tensors(slot)["a"].copy_(self.weights)
        checksums = self.file.checksums(slot, BUCKET)
        self.file.seal(slot, lineage, self.version)
        self.manifest = Manifest(self.layout, BUCKET, checksums, [1, 2], [-1.0])
        body = Publish(
            path="learner", slot=slot, lineage=lineage, version=self.version, manifest=self.manifest.to_wire()
        )
        await self.client.request(body, Ok)


class Rollout:
    """Follows without an engine."""

    def __init__(self, address, name, transports, progress_s=2.0):
        self.client = Client(address, peer="broadcaster")
        self.name, self.transports = name, transports
        self.receiver = Receiver(self.client, name, progress_s=progress_s, patience_s=10.0)
        self.held, self.weights, self.last = (0, -1), None, None

    async def ask(self):
        request = Follow(
            instance=self.name,
            path=None,
            slot=None,
            lineage=self.held[0],
            version=self.held[1],
            wait_ms=POLL_MS,
            transports=self.transports,
        )
        return (await self.client.request(request, Offer, wait_s=10))[0]

    async def follow(self):
        """Take one offer; whether it arrived."""
        offer = await self.ask()
        if offer.slot is None:
            return False
        self.last = offer
        found = await self.receiver.receive(offer, Manifest.from_wire(offer.manifest))
        if found is None:
            return False
        self.held, self.weights = (offer.lineage, offer.version), found[0].tensors(found[1])["a"].clone()
        return True

    async def reach(self, version):
        async with asyncio.timeout(30):
            while self.held[1] < version:
                await self.follow()

    async def close(self):
        self.receiver.close()
        await self.client.close()


class Hall:
    """A broadcaster, its learner, and rollouts."""

    def __init__(self, address, broadcaster):
        self.address, self.broadcaster = address, broadcaster
        self.client = Client(address, peer="broadcaster")
        self.learner = Learner(self.client)
        self.rollouts = []

    def rollout(self, *transports):
        self.rollouts.append(Rollout(self.address, f"rollout-{len(self.rollouts)}", list(transports)))
        return self.rollouts[-1]

    @property
    def figures(self):
        return self.broadcaster.figures


@asynccontextmanager
async def hall(tmp_path, monkeypatch, **weights):
    monkeypatch.setenv("STRETTO_SHM", str(tmp_path))
    broadcaster = Broadcaster(Weights(**{"progress_s": 2.0} | weights))
    server = Server("tcp://127.0.0.1:0", broadcaster.handle)
    tasks = [asyncio.create_task(part) for part in (server.run(), broadcaster.rounds.run())]
    place = Hall(server.address, broadcaster)
    try:
        yield place
    finally:
        for rollout in place.rollouts:
            await rollout.close()
        await place.client.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_right(place, rollout):
    return torch.equal(rollout.weights, place.learner.weights.bfloat16())


@pytest.mark.parametrize("transports", [("stream",), ("gloo",), ("gloo", "stream")])
@pytest.mark.parametrize("changed", [0.0, 0.02, 1.0])
async def test_every_version_arrives_bit_by_bit(tmp_path, monkeypatch, transports, changed):
    async with hall(tmp_path, monkeypatch) as place:
        rollouts = [place.rollout(*transports) for _ in range(2)]
        for version in range(4):
            await place.learner.publish(changed)
            await asyncio.gather(*(rollout.reach(version) for rollout in rollouts))
            assert all(is_right(place, rollout) for rollout in rollouts)


@pytest.mark.parametrize("transport", ["stream", "gloo"])
async def test_only_what_changed_is_sent(tmp_path, monkeypatch, transport):
    async with hall(tmp_path, monkeypatch) as place:
        rollout = place.rollout(transport)
        received = []
        for version in range(3):
            await place.learner.publish(0.02)
            await rollout.reach(version)
            received.append(rollout.receiver.figures["weights/received_mib"] * 2**20)
        assert received[0] == place.learner.layout.size_bytes
        assert max(received[1:]) < 0.05 * received[0]


@pytest.mark.parametrize("transport", ["stream", "gloo"])
async def test_without_deltas_all_is_sent(tmp_path, monkeypatch, transport):
    async with hall(tmp_path, monkeypatch, deltas=False) as place:
        rollout = place.rollout(transport)
        for version in range(2):
            await place.learner.publish(0.02)
            await rollout.reach(version)
            assert rollout.receiver.figures["weights/received_mib"] * 2**20 == place.learner.layout.size_bytes


async def test_a_stream_goes_on_where_the_base_is_overwritten(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        rollout = place.rollout("stream")
        await place.learner.publish()
        await rollout.reach(0)
        await rollout.client.request(Leave(instance=rollout.name), Ok)  # or the slot that it had would be held for it
        for _ in range(5):
            await place.learner.publish()
        await rollout.reach(5)
        assert is_right(place, rollout)
        assert rollout.receiver.figures["weights/received_mib"] * 2**20 == place.learner.layout.size_bytes


async def test_a_newcomer_gets_a_stream_and_takes_part_in_the_next_round(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        old, new = place.rollout("gloo", "stream"), place.rollout("gloo", "stream")
        await place.learner.publish()
        await old.reach(0)
        assert old.last.transport == "stream"
        await place.learner.publish()
        await old.reach(1)
        assert old.last.transport == "gloo" and old.last.round.size == 2
        first_epoch = old.last.round.epoch
        await new.reach(1)
        assert new.last.transport == "stream"
        waiting = [asyncio.create_task(rollout.reach(2)) for rollout in (old, new)]
        while len(place.broadcaster.rounds._waiting) < 2:
            await asyncio.sleep(0)
        await place.learner.publish()
        await asyncio.gather(*waiting)
        assert old.last.round.size == new.last.round.size == 3 and old.last.round.epoch != first_epoch
        epoch = new.last.round.epoch
        await place.learner.publish()
        await asyncio.gather(old.reach(3), new.reach(3))
        assert old.last.round.epoch == new.last.round.epoch == epoch  # the group is made once
        assert is_right(place, old) and is_right(place, new)


async def test_a_member_that_does_not_join_costs_the_others_one_deadline(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        members = [place.rollout("gloo") for _ in range(3)]
        await place.learner.publish()
        await asyncio.gather(*(member.reach(0) for member in members))
        silent = members.pop()
        asked = [asyncio.create_task(silent.ask()), *(asyncio.create_task(m.follow()) for m in members)]
        while len(place.broadcaster.rounds._waiting) < 3:
            await asyncio.sleep(0)
        start = asyncio.get_running_loop().time()
        await place.learner.publish()
        assert not await asked[1] and not await asked[2]
        await asyncio.gather(*(member.reach(1) for member in members))
        assert asyncio.get_running_loop().time() - start < 2.0 + 2.0
        assert place.figures["weights/broken_rounds"] == 1
        assert members[0].last.round.size == 3  # the broadcaster, and the two that are left
        await asked[0]
        await silent.reach(1)
        assert is_right(place, silent)


async def test_a_member_that_falls_silent_in_a_transfer_costs_the_others_one_deadline(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        members = [place.rollout("gloo") for _ in range(3)]
        await place.learner.publish()
        await asyncio.gather(*(member.reach(0) for member in members))
        silent = members.pop()
        asked = [asyncio.create_task(m.follow()) for m in members]
        offer = asyncio.create_task(silent.ask())
        while len(place.broadcaster.rounds._waiting) < 3:
            await asyncio.sleep(0)
        start = asyncio.get_running_loop().time()
        await place.learner.publish(changed=1.0)
        found = await offer
        join = Join(
            instance=silent.name,
            epoch=found.round.epoch,
            lineage=0,
            version=1,
            size_bytes=place.learner.layout.size_bytes,
        )
        await silent.client.request(join, Ok, wait_s=5.0)  # and never receives
        await asyncio.gather(*asked)
        await asyncio.gather(*(member.reach(1) for member in members))
        assert asyncio.get_running_loop().time() - start < 2.0 + 2.0
        assert all(is_right(place, member) for member in members)
        await silent.reach(1)
        assert is_right(place, silent)


async def test_a_member_of_another_size_is_not_let_in(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        rollout = place.rollout("gloo")
        await place.learner.publish()
        offer = await rollout.ask()
        join = Join(instance=rollout.name, epoch=offer.round.epoch, lineage=0, version=0, size_bytes=4096)
        with pytest.raises(ProtocolError, match="aborted: 4096 bytes instead of"):
            await rollout.client.request(join, Ok)
        await rollout.reach(0)
        assert is_right(place, rollout)


async def test_rollouts_whose_group_cannot_be_made_get_streams(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch, progress_s=0.5) as place:
        rollout = place.rollout("gloo", "stream")
        rollout.receiver._host = "127.0.0.2"  # nothing listens there
        await place.learner.publish()
        await rollout.reach(0)
        await place.learner.publish()
        await rollout.reach(1)
        assert rollout.last.transport == "stream" and is_right(place, rollout)


async def test_a_damaged_bucket_is_never_used(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch, deltas=False) as place:
        rollout = place.rollout("stream")
        await place.learner.publish()
        place.learner.file.tensors(0)["a"][7] += 1.0
        for _ in range(MOST_FAILURES - 1):
            assert not await rollout.follow()
        with pytest.raises(WeightsError, match="bucket 0 of 7 arrived damaged"):
            await rollout.follow()
        assert rollout.held == (0, -1)


async def test_a_snapshot_that_is_not_held_for_a_rollout_is_not_sent(tmp_path, monkeypatch):
    async with hall(tmp_path, monkeypatch) as place:
        await place.learner.publish()
        fetch = Fetch(instance="stranger", lineage=0, version=0, bucket=0, base_lineage=0, base_version=-1)
        with pytest.raises(ProtocolError, match="unknown_lease: version 0 is not held for stranger any more"):
            await place.client.request(fetch, Bucket)
        rollout = place.rollout("stream")
        await rollout.ask()
        beyond = fetch.model_copy(update={"instance": rollout.name, "bucket": 7})
        with pytest.raises(ProtocolError, match="there is no bucket 7"):
            await rollout.client.request(beyond, Bucket)


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
        path.follower.check_slot()


@pytest.mark.parametrize(
    ("is_here", "keys", "taken"), [(True, None, "shm"), (False, None, "gloo"), (False, 1, "stream")]
)
async def test_the_transport_is_chosen_by_what_can_be_reached(tiny_model, tmp_path, monkeypatch, is_here, keys, taken):
    async with weight_path(tiny_model, tmp_path, monkeypatch) as path:
        monkeypatch.setattr(follower_module, "is_here", lambda name: is_here)
        monkeypatch.setattr(follower_module, "find_keys", lambda: keys)
        for version in range(2):
            await path.publish(version)
            while path.engine.version < version:
                await path.follower.follow()
        assert path.follower._transports()[0] == taken
        assert (path.follower._file.path == path.publisher._file.path) == is_here
        assert np.isfinite(path.follower.figures["weights/probe_error"])

"""The weight path from the learner's masters to an engine, over real sockets and shared memory."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import torch

from protocol.channel import Server
from services.broadcaster.service import Broadcaster
from services.compute.hf import HFBackend
from services.compute.packing import PackedRows
from services.learner.publisher import Publisher
from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.engine import Request
from services.rollout.follower import Follower
from shared.config import Sampling, parse_config
from shared.errors import WeightsError


def config_of(model, dtype="float32", **weights):
    return parse_config(
        {
            "model": str(model),
            "steps": 1,
            "prompts_per_step": 1,
            "samples_per_prompt": 2,
            "data": {"train": "none"},
            "reward": {"signals": [{"name": "s", "function": "exact_match"}]},
            "learner": {"dtype": dtype},
            "rollout": {"dtype": dtype},
            "weights": weights,
        }
    )


class Path:
    """A learner's publisher, a broadcaster, and one engine that follows."""

    def __init__(self, config, address):
        self.config = config
        self.address = address
        self.backend = HFBackend.load(config.model, config.learner)
        self.publisher = Publisher(address, "test", self.backend, config)
        self.engine = EmbeddedEngine.load(config.model, dtype=config.rollout.dtype, max_samples=8)
        self.versions = []
        self.follower = Follower(address, self.engine, config, "rollout-0", on_version=self.versions.append)

    def serve(self, server, broadcaster):
        self._serving = [asyncio.create_task(part) for part in (server.run(), broadcaster.rounds.run())]

    async def stop_serving(self):
        for part in self._serving:
            part.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def restart_broadcaster(self, free_again):
        await self.stop_serving()
        await free_again(self.address)
        broadcaster = Broadcaster(self.config.weights)
        self.serve(Server(self.address, broadcaster.handle), broadcaster)

    async def publish(self, version):
        tensors = await self.publisher.acquire(0, version)
        self.publisher.write(tensors)
        return await self.publisher.publish(0, version)

    def train(self, amount=0.05):
        generator = torch.Generator().manual_seed(len(self.versions))
        with torch.no_grad():
            for parameter in self.backend.parameters.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * amount)


@asynccontextmanager
async def weight_path(model, tmp_path, monkeypatch, dtype="float32", **weights):
    monkeypatch.setenv("STRETTO_SHM", str(tmp_path))
    config = config_of(model, dtype, **weights)
    broadcaster = Broadcaster(config.weights)
    server = Server("tcp://127.0.0.1:0", broadcaster.handle)
    path = Path(config, server.address)
    path.serve(server, broadcaster)
    try:
        yield path
    finally:
        await path.engine.close()
        await path.follower.snapshots.close()
        await path.publisher.close()
        await path.stop_serving()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_engine_serves_each_version_with_the_learners_weights_in_place(
    tiny_model, tmp_path, monkeypatch, dtype
):
    async with weight_path(tiny_model, tmp_path, monkeypatch, dtype) as path:
        for version in range(5):
            path.train()
            await path.publish(version)
            await path.follower.follow()
            assert path.engine.version == version
            slot = path.publisher.slots.file.tensors(path.follower.snapshots.in_use.slot)
            for name, parameter in path.engine.model.named_parameters():
                own = path.backend._model.get_parameter(name)
                assert torch.equal(parameter, own), name
                assert torch.equal(parameter, slot[name])
        assert path.versions == [0, 1, 2, 3, 4]


async def test_weights_are_swapped_while_samples_are_in_flight(tiny_model, tmp_path, monkeypatch):
    async with weight_path(tiny_model, tmp_path, monkeypatch) as path:
        await path.publish(0)
        await path.follower.follow()
        sampling = Sampling(max_tokens=400, ignore_eos=True)
        generating = asyncio.create_task(path.engine.generate(Request("r", [1, 2, 3], 4, sampling, 0)))
        for version in (1, 2, 3):
            path.train()
            await path.publish(version)
            await path.follower.follow()
        samples = await generating
        for sample in samples:
            assert len(sample.tokens) == 400
            assert set(np.diff(sample.versions)) <= {0, 1, 2, 3} and sample.versions[-1] == 3


async def test_wrong_weights_are_never_served(tiny_model, tmp_path, monkeypatch):
    async with weight_path(tiny_model, tmp_path, monkeypatch) as path:
        await path.publish(0)
        await path.follower.follow()
        path.train()
        swap = path.engine.swap

        async def forgets_a_tensor(weights):
            tensors = dict(weights.tensors)
            name = next(n for n in tensors if "mlp" in n)
            tensors[name] = torch.zeros_like(tensors[name])
            return await swap(type(weights)(weights.lineage, weights.version, tensors))

        path.engine.swap = forgets_a_tensor
        await path.publish(1)
        with pytest.raises(WeightsError, match=r"off by .* at version 1 .*also after a second load"):
            await path.follower.follow()
        assert path.versions == [0]


async def test_the_probe_is_scored_alike_on_both_sides_after_an_update(tiny_model, tmp_path, monkeypatch):
    """In bfloat16 another attention kernel rounds otherwise: training must not change what the probe is scored with."""
    rows = PackedRows(
        ids=np.array([[1, 2, 3]]),
        positions=np.array([[0, 1, 2]]),
        segment=np.array([[0, 0, 1]]),
        source=np.array([1, 2]),
        target=np.array([3, 4]),
        columns={},
        sample=np.zeros(2, dtype="i8"),
        lag=np.zeros(2, dtype="i8"),
        mask=np.ones(2, dtype=bool),
        n_samples=1,
    )
    async with weight_path(tiny_model, tmp_path, monkeypatch, "bfloat16", probe_tokens=64) as path:
        for version in range(2):
            path.backend.logprobs(rows, 1.0)
            await path.publish(version)
            await path.follower.follow()
            assert path.follower.figures["weights/probe_error"] == 0


async def test_a_tied_head_follows_its_embedding(tiny_model, tmp_path, monkeypatch):
    async with weight_path(tiny_model, tmp_path, monkeypatch) as path:
        path.train()
        await path.publish(0)
        await path.follower.follow()
        model = path.engine.model
        assert model.lm_head.weight is model.model.embed_tokens.weight


async def test_a_damaged_snapshot_is_refused(tiny_model, tmp_path, monkeypatch):
    async with weight_path(tiny_model, tmp_path, monkeypatch) as path:
        tensors = await path.publisher.acquire(0, 0)
        path.publisher.write(tensors)
        next(iter(tensors.values())).view(-1)[0] += 1
        await path.publisher.publish(0, 0)
        with pytest.raises(WeightsError, match="buckets of slot 0"):
            await path.follower.follow()
        assert path.versions == []


async def test_a_rollout_follows_a_learner_that_started_again(tiny_model, tmp_path, monkeypatch):
    async with weight_path(tiny_model, tmp_path, monkeypatch) as path:
        await path.publish(0)
        await path.follower.follow()
        await path.publisher.close()
        path.publisher = Publisher(path.address, "test", path.backend, path.config)
        path.train()
        await path.publish(1)
        await path.follower.follow()
        assert path.versions == [0, 1]
        assert path.follower.snapshots.in_use.file.path == path.publisher.slots.file.path


async def test_a_rollout_notices_that_its_slot_was_overwritten(tiny_model, tmp_path, monkeypatch):
    async with weight_path(tiny_model, tmp_path, monkeypatch) as path:
        await path.publish(0)
        await path.follower.follow()
        path.follower.snapshots.check()
        path.publisher.slots.file.begin(path.follower.snapshots.in_use.slot)
        with pytest.raises(WeightsError, match="version 0 was overwritten while rollout-0 still used it"):
            path.follower.snapshots.check()


async def test_a_broadcaster_that_started_again_never_has_the_learner_write_what_is_read(
    tiny_model, tmp_path, monkeypatch, free_again
):
    async with weight_path(tiny_model, tmp_path, monkeypatch) as path:
        await path.publish(0)
        await path.follower.follow()
        before = path.publisher.slots.file.path
        await path.restart_broadcaster(free_again)
        while not path.publisher.is_forgotten:
            await asyncio.sleep(0.01)
        for version in (1, 2, 3):  # as many as there are slots
            path.train()
            assert await path.publish(version)
            path.follower.snapshots.check()
        assert path.publisher.slots.file.path != before and not before.exists()
        assert not path.publisher.is_forgotten
        await path.follower.follow()
        assert path.versions == [0, 3] and path.follower.figures["weights/probe_error"] < 1e-3


async def test_a_snapshot_that_was_written_while_the_broadcaster_started_again_is_written_anew(
    tiny_model, tmp_path, monkeypatch, free_again
):
    async with weight_path(tiny_model, tmp_path, monkeypatch) as path:
        tensors = await path.publisher.acquire(0, 0)
        await path.restart_broadcaster(free_again)
        path.publisher.write(tensors)
        assert not await path.publisher.publish(0, 0)
        assert await path.publish(0)
        await path.follower.follow()
        assert path.versions == [0]


async def test_samples_wait_for_the_proof_of_their_weights(tiny_model, tmp_path, monkeypatch):
    async with weight_path(tiny_model, tmp_path, monkeypatch) as path:
        await path.publish(0)
        await path.follower.follow()
        await path.publish(1)
        score, release, scored = path.engine.score, asyncio.Event(), asyncio.Event()

        async def late_score(tokens):
            scored.set()
            await release.wait()
            return await score(tokens)

        path.engine.score = late_score
        following = asyncio.create_task(path.follower.follow())
        await scored.wait()
        await path.follower.proven({0})
        waiting = asyncio.create_task(path.follower.proven({0, 1}))
        await asyncio.sleep(0)
        assert not waiting.done()
        release.set()
        await asyncio.gather(following, waiting)


async def test_samples_of_weights_that_were_loaded_twice_are_void(tiny_model, tmp_path, monkeypatch):
    async with weight_path(tiny_model, tmp_path, monkeypatch) as path:
        await path.publish(0)
        await path.follower.follow()
        await path.publish(1)
        score, waiting = path.engine.score, []

        async def wrong_once(tokens):
            if waiting:
                return await score(tokens)
            waiting.append(asyncio.create_task(path.follower.proven({1})))
            await asyncio.sleep(0)
            return await score(tokens) + 1

        path.engine.score = wrong_once
        await path.follower.follow()
        with pytest.raises(WeightsError, match="made anew"):
            await waiting[0]
        assert path.versions == [0, 1]

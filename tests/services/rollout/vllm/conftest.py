"""One engine and one learner that share snapshots, for all tests of a module: an engine takes 20 s to start."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from services.rollout.engine import Request, Slot, Weights
from shared.config import Learner, Rollout, Sampling
from shared.snapshot import Layout, SnapshotFile


class Pair:
    """A learner's model and a vLLM engine that takes its weights."""

    def __init__(self, backend, engine, file: SnapshotFile) -> None:
        self.backend = backend
        self.engine = engine
        self.file = file
        self.originals = {name: p.detach().clone() for name, p in backend.parameters.items()}
        self.version = -1

    def publish(self, version: int | None = None) -> Weights:
        """The learner's weights as a snapshot, of the next version."""
        self.version = self.version + 1 if version is None else version
        slot = self.version % 3
        self.file.begin(slot)
        self.backend.write_snapshot(self.file.tensors(slot))
        self.file.seal(slot, 0, self.version)
        self.backend.use_snapshot(self.file.tensors(slot))
        return Weights(0, self.version, self.file.tensors(slot), Slot(self.file.path.name, slot, self.file.layout))

    def train(self, amount: float = 0.05) -> None:
        """Change every weight."""
        import torch

        torch.manual_seed(self.version + 1)
        with torch.no_grad():
            for parameter in self.backend.parameters.values():
                parameter.add_(torch.randn_like(parameter) * amount)

    def always_say(self, token: int) -> None:
        """Weights whose answer is one token, whatever was said before."""
        import torch

        with torch.no_grad():
            for name, parameter in self.backend.parameters.items():
                parameter.zero_()
                if name.endswith("embed_tokens.weight"):
                    parameter[:, 0] = 0.1
                    parameter[token, 0] = 1.0
                elif name.endswith("model.norm.weight"):
                    parameter[0] = 50.0

    def restore(self) -> None:
        """The weights of the beginning."""
        import torch

        with torch.no_grad():
            for name, parameter in self.backend.parameters.items():
                parameter.copy_(self.originals[name])

    def error(self, tokens: list[int], logprobs: np.ndarray) -> float:
        """Largest difference between log-probs of tokens[1:] and the learner's."""
        return float(np.abs(self.backend.score(tokens) - logprobs).max())

    async def answer(
        self, name: str, n: int = 2, prompt: list[int] | None = None, seed: int = 1, priority: int = 0, **sampling
    ):
        """The samples of a request."""
        settings = Sampling(**{"max_tokens": 12, "ignore_eos": True} | sampling)
        return await self.engine.generate(Request(name, prompt or list(b"what is it?"), n, settings, seed, priority))


async def in_flight(pair: Pair, count: int) -> None:
    async with asyncio.timeout(20):
        while pair.engine.stats()["samples_in_flight"] < count:
            await asyncio.sleep(0)


async def swap_while_it_speaks(pair: Pair) -> None:
    """30 swaps, each to weights that always say another token: what was said must be what the version says."""
    pair.always_say(100)
    first = pair.publish()
    await pair.engine.swap(first)
    said = {first.version: 100}
    answers = [asyncio.create_task(pair.answer(f"long {i}", n=4, max_tokens=400)) for i in range(2)]
    await in_flight(pair, 8)
    for token in range(101, 131):
        pair.always_say(token)
        weights = pair.publish()
        said[weights.version] = token
        assert await pair.engine.swap(weights) < 1
    for samples in await asyncio.gather(*answers):
        for sample in samples:
            assert len(sample.tokens) == 400 and len(set(sample.versions.tolist())) > 3
            assert sample.tokens.tolist() == [said[version] for version in sample.versions.tolist()]


async def make_pair(model: Path, *, stage: bool, **settings) -> Pair:
    from services.compute.hf import HFBackend
    from services.rollout.vllm.engine import VllmEngine

    backend = HFBackend.load(str(model), Learner(dtype="float32"))
    layout = Layout.of({name: tuple(p.shape) for name, p in backend.parameters.items()}, "float32")
    file = SnapshotFile.create(f"stretto-vllm-{os.getpid()}-{time.monotonic_ns()}", layout, 3)
    vllm = {"stage": stage, "cache_gib": 0.25} | settings
    rollout = Rollout(engine="vllm", dtype="float32", max_samples=16, max_context=500, vllm=vllm)
    engine = await asyncio.to_thread(VllmEngine.load, str(model), rollout)
    return Pair(backend, engine, file)


async def end_pair(pair: Pair) -> None:
    await pair.engine.close()
    pair.file.unlink()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_pair(vllm_model: Path) -> AsyncIterator[Pair]:
    pair = await make_pair(vllm_model, stage=True)
    yield pair
    await end_pair(pair)


@pytest_asyncio.fixture(loop_scope="module")
async def pair(shared_pair: Pair) -> Pair:
    """The module's pair, both with the weights of the beginning."""
    shared_pair.restore()
    await shared_pair.engine.swap(shared_pair.publish())
    return shared_pair


@pytest_asyncio.fixture(loop_scope="module")
async def plain_pair(vllm_model: Path) -> AsyncIterator[Pair]:
    """A pair of its own, which loads weights without staging and has none yet."""
    pair = await make_pair(vllm_model, stage=False)
    yield pair
    await end_pair(pair)


@pytest.fixture(autouse=True, scope="session")
def quiet_shared_memory(tmp_path_factory: pytest.TempPathFactory):
    """Snapshots of these tests lie in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRETTO_SHM", str(tmp_path_factory.mktemp("shm")))
        yield

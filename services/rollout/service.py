"""The rollout service: leases prompts, generates samples with an engine, and follows the learner's weights."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace

import numpy as np

from services.actor import StageActor
from services.member import Member
from services.rollout.engine import Engine, Request, Sample
from services.rollout.follower import Follower
from services.rollout.prompts import PromptRenderer
from shared.algorithms import load_algorithm
from shared.config import RunConfig
from shared.group import Columns, Lane, TrajectoryGroup, ragged, ragged_text, version_runs

EVALUATION_PRIORITY = -1


class RolloutService:
    """One engine in a run. A group is one request of n samples."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._config = member.config
        algorithm = load_algorithm(self._config.algorithm)
        self._has_greedy = algorithm.greedy_baseline
        self._samples: dict[Lane, int] = {"train": algorithm.samples(self._config), "eval": 1}
        self._checked = False

    async def run(self) -> None:
        """Load the engine, take the current weights, then generate until cancelled."""
        engine = await asyncio.to_thread(load_engine, self._config)
        try:
            await self._serve(engine)
        finally:
            await engine.close()

    async def _serve(self, engine: Engine) -> None:
        member = self._member
        self._engine = engine
        self._end_tokens = engine.end_tokens
        self._renderer = PromptRenderer(engine.tokenizer, self._config.data)
        member.state = "STALE"
        member.account.enter("weights")
        self._follower = Follower(
            await member.locate("broadcaster"), engine, self._config, member.instance, on_version=self._tell_version
        )
        await self._follower.first()
        member.state = "SERVING"
        actor = StageActor(
            member,
            self._generate,
            capacity=max(self._config.rollout.max_samples, self._samples["train"]),
            samples=self._samples,
            idle_bucket="room",
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.failed(), name="engine")
            tasks.create_task(self._follower.run(), name="weights")
            tasks.create_task(actor.run(), name="stage")

    def _tell_version(self, version: int) -> None:
        """The broker hands out groups by the version that this rollout holds."""
        self._member.holds_version = version
        self._member.beat_soon()

    async def _generate(self, group: TrajectoryGroup) -> Columns:
        """The columns that the rollout stage provides for one group."""
        if not self._checked:
            self._renderer.check(group.prompt, self._end_tokens)
            self._checked = True
        sampling = self._config.sampling if group.lane == "train" else self._config.eval_sampling
        request = Request(
            request_id=group.group_id,
            prompt_tokens=self._renderer.tokens(group.prompt),
            n=self._config.samples_per_prompt if group.lane == "train" else 1,
            sampling=sampling,
            seed=zlib.crc32(f"{self._config.seed}/{group.group_id}".encode()),
            priority=priority(group),
        )
        requests = [request]
        if self._has_greedy and group.lane == "train":
            greedy = sampling.model_copy(update={"temperature": 0.0})
            requests.append(replace(request, request_id=f"{group.group_id}/greedy", n=1, sampling=greedy))
        parts = await asyncio.gather(*map(self._engine.generate, requests))
        samples = [sample for part in parts for sample in part]
        await self._follower.proven({int(version) for sample in samples for version in sample.versions[-1:]})
        self._follower.snapshots.check()
        self._member.figures.update(self._engine.stats() | self._follower.figures)
        columns = sample_columns(request.prompt_tokens, samples)
        if self._has_greedy:
            columns["greedy"] = np.arange(len(samples)) >= request.n
        return columns


def load_engine(config: RunConfig) -> Engine:
    """The engine that a run asks for. Raises ConfigError and what the engine's `load` raises."""
    rollout = config.rollout
    if rollout.engine == "vllm":
        from services.rollout.vllm.engine import VllmEngine

        return VllmEngine.load(config.model, rollout, tokenizer=config.tokenizer)
    from services.rollout.embedded.engine import EmbeddedEngine

    return EmbeddedEngine.load(
        config.model,
        tokenizer=config.tokenizer,
        dtype=rollout.dtype,
        max_samples=rollout.max_samples,
        max_context=rollout.max_context,
    )


def priority(group: TrajectoryGroup) -> int:
    """Request.priority of a group: evaluation first, then what is trained first, since it may lag the least."""
    return EVALUATION_PRIORITY if group.lane == "eval" else group.min_version


def sample_columns(prompt_tokens: list[int], samples: list[Sample]) -> Columns:
    """The columns of shared/group.py that samples of one prompt make."""
    runs = [version_runs(sample.versions) for sample in samples]
    offsets = np.zeros(len(runs) + 1, dtype="i8")
    np.cumsum([len(run) for run in runs], out=offsets[1:])
    columns = ragged("tokens", [sample.tokens for sample in samples], "i4")
    return columns | {
        "prompt_tokens": np.asarray(prompt_tokens, dtype="i4"),
        "loss_mask": np.ones(len(columns["tokens"]), dtype=bool),
        "behavior_logprobs": np.concatenate([sample.logprobs for sample in samples]).astype("f4"),
        "versions": np.concatenate(runs),
        "versions_offsets": offsets,
        "finish_reasons": np.asarray([sample.finish_reason for sample in samples], dtype="u1"),
        **ragged_text("text", [sample.text for sample in samples]),
    }


async def serve(broker: str, instance: str) -> None:
    """Run a rollout until the run ends."""
    member = Member(broker, "rollout", instance, stage="rollout")
    await member.join()
    await member.run(RolloutService(member).run)

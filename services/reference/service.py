"""The reference service: log-probs of the samples under the policy that a run began with, or another frozen one."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from services.actor import StageActor
from services.compute.hf import HFBackend
from services.compute.inference import TokenStage
from services.compute.memory import Room
from services.member import Member

GROUPS_AT_ONCE = 32


async def serve(broker: str, instance: str) -> None:
    """Score groups until the run ends."""
    member = Member(broker, "reference", instance, stage="reference")
    config = await member.join()
    reference, temperature = config.reference, config.sampling.temperature
    thread = ThreadPoolExecutor(1, thread_name_prefix="reference")

    async def work() -> None:
        model = await asyncio.to_thread(
            HFBackend.frozen, reference.model or config.model, reference.dtype, tokenizer=config.tokenizer
        )
        room = Room("reference", reference)
        stage = TokenStage("ref_logprobs", lambda rows: model.logprobs(rows, temperature)[0], room, thread)
        member.state = "SERVING"
        await StageActor(member, stage.process, capacity=GROUPS_AT_ONCE, idle_bucket="groups").run()

    await member.run(work)

"""The reward service: leases generated groups and scores them with the run's reward functions."""

from __future__ import annotations

from services.actor import StageActor
from services.member import Member
from services.reward.score import Scorer

GROUPS_AT_ONCE = 32


async def serve(broker: str, instance: str) -> None:
    """Score groups until the run ends."""
    member = Member(broker, "reward", instance, stage="reward")
    config = await member.join()
    scorer = Scorer(config.reward)

    async def work() -> None:
        await scorer.start()
        member.state = "SERVING"
        await StageActor(member, scorer.score, capacity=GROUPS_AT_ONCE, idle_bucket="groups").run()

    try:
        await member.run(work)
    finally:
        await scorer.close()

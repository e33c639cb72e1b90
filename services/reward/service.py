"""Leases groups and scores them with the signals of a stage: the reward, the cost, or one of the run's own."""

from __future__ import annotations

from services.actor import StageActor
from services.member import Member
from services.reward.score import Scorer
from shared.errors import ConfigError

GROUPS_AT_ONCE = 32


async def serve(broker: str, instance: str, stage: str = "reward") -> None:
    """Score groups until the run ends. Raises ConfigError where the run has no such stage."""
    member = Member(broker, "cost" if stage == "cost" else "reward", instance, stage=stage)
    config = await member.join()
    if stage not in config.scoring:
        raise ConfigError(f"the run has no stage {stage!r} that scores; it has {', '.join(config.scoring)}")
    scorer = Scorer(config.scoring[stage][0], stage)

    async def work() -> None:
        await scorer.start()
        member.state = "SERVING"
        await StageActor(member, scorer.score, capacity=GROUPS_AT_ONCE, idle_bucket="groups").run()

    try:
        await member.run(work)
    finally:
        await scorer.close()

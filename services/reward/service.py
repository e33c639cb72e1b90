"""The reward service: leases generated groups and scores them with the run's signals. It serves the cost stage too."""

from __future__ import annotations

from services.actor import StageActor
from services.member import Member
from services.reward.score import Scorer
from services.reward.signals import Stage
from shared.errors import ConfigError

GROUPS_AT_ONCE = 32


async def serve(broker: str, instance: str, service: Stage = "reward") -> None:
    """Score groups until the run ends. Raises ConfigError where the run has no such stage."""
    member = Member(broker, service, instance, stage=service)
    config = await member.join()
    settings = config.reward if service == "reward" else config.cost
    if settings is None:
        raise ConfigError("the run scores no costs: its config has no `cost`")
    scorer = Scorer(settings, service)

    async def work() -> None:
        await scorer.start()
        member.state = "SERVING"
        await StageActor(member, scorer.score, capacity=GROUPS_AT_ONCE, idle_bucket="groups").run()

    try:
        await member.run(work)
    finally:
        await scorer.close()

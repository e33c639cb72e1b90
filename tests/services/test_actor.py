"""The stage actor and the membership, against a broker of a few lines over real sockets."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest

from protocol.channel import Server
from protocol.codec import join_groups
from protocol.events import EventPublisher
from protocol.messages import (
    Complete,
    Fail,
    Heartbeat,
    Hello,
    Lease,
    Leased,
    LeaseRequest,
    Leave,
    Ok,
    Pulse,
    Welcome,
)
from services.actor import StageActor
from services.member import Member
from shared.config import parse_config
from shared.errors import EngineFailed, ProtocolError, StrettoError
from shared.group import Prompt

CONFIG = parse_config(
    {
        "model": "none",
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "steps": 1,
        "data": {"train": "none"},
        "reward": {"signals": [{"name": "exact", "function": "exact_match"}]},
        "broker": {"heartbeat_s": 0.05},
    }
)


class FewLineBroker:
    """Hands out the groups it was given, stops the run when all are answered, and keeps what it was told."""

    def __init__(self, lanes: list[str]) -> None:
        self.lanes = lanes
        self.requests: list[LeaseRequest] = []
        self.answers: dict[str, object] = {}
        self.columns: dict[str, dict] = {}
        self.hellos: list[Hello] = []
        self.left: list[Leave] = []
        self.forget = False
        self.given = 0
        self.events = EventPublisher("tcp://127.0.0.1:0")

    async def handle(self, message):
        match message.body:
            case Hello() as hello:
                self.hellos.append(hello)
                return Welcome(
                    run_id="r",
                    run_folder="/none",
                    config=CONFIG.model_dump(mode="json"),
                    lineage=0,
                    version=3,
                    total_steps=1,
                    heartbeat_s=0.05,
                    broker_epoch="e",
                    events_address=self.events.address,
                )
            case Heartbeat():
                if self.forget:
                    self.forget = False
                    raise ProtocolError("not_member", "say hello")
                done = len(self.answers) == len(self.lanes)
                return Pulse(
                    lineage=0,
                    version=3,
                    broker_epoch="e",
                    draining=False,
                    stop_reason="all done" if done else None,
                )
            case LeaseRequest() as request:
                return await self.lease(request)
            case Complete() | Fail() as answer:
                self.answers[answer.group_id] = answer
                self.columns[answer.group_id] = message.columns
                return Ok()
            case Leave() as leave:
                self.left.append(leave)
                return Ok()
        raise ProtocolError("unknown_type", message.body.type)

    async def lease(self, request: LeaseRequest):
        self.requests.append(request)
        leases, columns = [], []
        while self.given < len(self.lanes) and len(leases) < request.max_groups:
            i = self.given
            prompt = Prompt(i, 0, "q").to_wire()
            leases.append(
                Lease(
                    lease_id=f"l{i}",
                    group_id=f"g{i}",
                    attempt=1,
                    lease_s=60.0,
                    lane=self.lanes[i],
                    min_version=0,
                    prompt=prompt,
                )
            )
            columns.append({"x": np.full(2, i, dtype="i4")})
            self.given += 1
        if not leases:
            await asyncio.Event().wait()
        return Leased(leases=leases), join_groups(columns)


@asynccontextmanager
async def running(broker):
    server = Server("tcp://127.0.0.1:0", broker.handle)
    task = asyncio.create_task(server.run())
    try:
        yield server.address
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        broker.events.close()


async def double(group):
    return {"y": group.columns["x"] * 2}


async def test_groups_are_leased_processed_and_completed_until_the_run_ends():
    broker = FewLineBroker(["train"] * 5)
    async with running(broker) as address:
        member = Member(address, "reward", "reward-0", stage="reward")
        await member.join()
        await member.run(StageActor(member, double, capacity=2, idle_bucket="groups").run)
    assert [broker.columns[f"g{i}"]["y"].tolist() for i in range(5)] == [[2 * i] * 2 for i in range(5)]
    assert all(request.max_groups <= 2 for request in broker.requests)
    assert [leave.error for leave in broker.left] == [None]
    account = member.account.seconds()
    assert account["compute"] > 0 and account["groups"] > 0


async def test_a_group_that_raises_is_failed_with_the_reason_and_the_others_go_on():
    async def picky(group):
        if group.group_id == "g1":
            raise StrettoError("the server said no")
        if group.group_id == "g2":
            raise ZeroDivisionError("by zero")
        return await double(group)

    broker = FewLineBroker(["train"] * 4)
    async with running(broker) as address:
        member = Member(address, "reward", "reward-0", stage="reward")
        await member.join()
        await member.run(StageActor(member, picky, capacity=4, idle_bucket="groups").run)
    assert broker.answers["g1"].error == "the server said no"
    assert broker.answers["g2"].error == "ZeroDivisionError: by zero"
    assert isinstance(broker.answers["g3"], Complete)


async def test_a_service_whose_engine_is_gone_leaves_without_blaming_its_groups():
    async def without_engine(group):
        raise EngineFailed("the engine core has died")

    broker = FewLineBroker(["train"] * 2)
    async with running(broker) as address:
        member = Member(address, "rollout", "rollout-0", stage="rollout")
        await member.join()
        with pytest.raises(EngineFailed):
            await member.run(StageActor(member, without_engine, capacity=2, idle_bucket="room").run)
    assert broker.answers == {}
    assert [leave.error for leave in broker.left] == ["the engine core has died"]


async def test_room_counted_in_samples_is_told_to_the_broker():
    broker = FewLineBroker(["eval", "eval", "train"])
    async with running(broker) as address:
        member = Member(address, "rollout", "rollout-0", stage="rollout")
        await member.join()
        actor = StageActor(member, double, capacity=8, samples={"train": 4, "eval": 1}, idle_bucket="room")
        await member.run(actor.run)
    assert broker.requests[0].max_samples == 8


async def test_a_service_that_the_broker_forgot_says_hello_again():
    broker = FewLineBroker(["train"])
    broker.forget = True
    async with running(broker) as address:
        member = Member(address, "reward", "reward-0", stage="reward")
        await member.join("tcp://1.2.3.4:5")
        await member.run(StageActor(member, double, capacity=1, idle_bucket="groups").run)
    assert len(broker.hellos) == 2
    assert {hello.address for hello in broker.hellos} == {"tcp://1.2.3.4:5"}


async def test_the_error_of_the_work_is_told_to_the_broker_and_raised():
    async def work():
        raise StrettoError("no model here")

    broker = FewLineBroker(["train"])
    async with running(broker) as address:
        member = Member(address, "rollout", "rollout-0", stage="rollout")
        await member.join()
        with pytest.raises(StrettoError, match="no model here"):
            await member.run(work)
    assert [leave.error for leave in broker.left] == ["no model here"]

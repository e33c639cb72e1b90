"""The members of a run: who is there, since when unheard of, what they reported; and the bottleneck that follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from protocol.messages import Hello
from shared.account import BUCKETS
from shared.errors import ProtocolError

MISSED_HEARTBEATS = 3
MAX_MEMBERS = 4096
MAX_DEPARTED = 256
MAX_FIGURES = 256


@dataclass(slots=True)
class Listed:
    """One member. last_seen: seconds on the server's clock; seconds: its time account; figures: its own numbers."""

    hello: Hello
    last_seen: float
    state: str = "STARTING"
    version: int = -1
    seconds: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


class Roster:
    """Membership by heartbeats. Time is an argument."""

    def __init__(self, heartbeat_s: float) -> None:
        self._patience_s = heartbeat_s * MISSED_HEARTBEATS
        self._members: dict[str, Listed] = {}
        self._departed: dict[str, Listed] = {}

    def __contains__(self, instance: str) -> bool:
        return instance in self._members

    def session(self, instance: str) -> Listed | None:
        """The membership of an instance since it last said hello; None for who is no member."""
        return self._members.get(instance)

    def join(self, hello: Hello, now: float) -> None:
        """An instance says hello, for the first time or again, which begins a new session. Raises ProtocolError."""
        if len(self) >= MAX_MEMBERS and hello.instance not in self:
            raise ProtocolError("too_many", f"the run has {MAX_MEMBERS} members")
        self._members[hello.instance] = Listed(hello, now)
        self._departed.pop(hello.instance, None)

    def beat(self, instance: str, state: str, version: int, stats: dict[str, Any], now: float) -> None:
        """An instance gave a sign of life, with its figures."""
        member = self._members[instance]
        if max(len(stats.get("time", ())), len(stats.get("figures", ()))) > MAX_FIGURES:
            raise ValueError(f"more than {MAX_FIGURES} figures")
        member.last_seen, member.state, member.version = now, state, version
        member.seconds = {str(k): float(v) for k, v in stats.get("time", {}).items()}
        member.figures = {str(k): float(v) for k, v in stats.get("figures", {}).items()}

    def service(self, instance: str) -> str:
        """What an instance runs."""
        return self._members[instance].hello.service

    def version(self, instance: str) -> int:
        """The policy version of the weights that an instance holds; -1 where it holds none."""
        return self._members[instance].version

    def leave(self, instance: str) -> None:
        """An instance is gone; what it last reported is kept."""
        if instance in self._members:
            self._departed[instance] = self._members.pop(instance)
            if len(self._departed) > MAX_DEPARTED:
                del self._departed[next(iter(self._departed))]

    def silent(self, now: float) -> list[str]:
        """Instances that missed three heartbeats."""
        return [name for name, m in self._members.items() if now - m.last_seen > self._patience_s]

    def gone(self) -> list[str]:
        """Instances that left or fell silent, and have not come back."""
        return list(self._departed)

    def of(self, service: str) -> list[Listed]:
        """The members that run a service, or work at a stage of that name."""
        return [m for m in self._members.values() if (m.hello.stage or m.hello.service) == service]

    def address(self, service: str) -> str | None:
        """Where a service listens, if one is there that does."""
        return next((m.hello.address for m in self.of(service) if m.hello.address), None)

    def __len__(self) -> int:
        return len(self._members)

    def status(self, now: float) -> list[dict[str, Any]]:
        """One plain record a member."""
        return [_record(member, now) for member in self._members.values()]

    def departed(self, now: float) -> list[dict[str, Any]]:
        """The same for those that left, as they last were."""
        return [_record(member, now) for member in self._departed.values()]

    def bottleneck(self) -> str:
        """What paces the run, in one sentence, from the learner's and the rollouts' time accounts."""
        everybody = [*self._members.values(), *self._departed.values()]
        learner = _share([m for m in everybody if m.hello.service == "learner"])
        rollout = _share([m for m in everybody if m.hello.service == "rollout"])
        if learner is None or rollout is None:
            return "not known yet"
        waits, idle = learner["groups"], rollout["room"]
        if learner["weights"] > max(waits, 0.1):
            return f"the learner waits for rollouts to take new weights ({learner['weights']:.0%} of its time)"
        if waits > 0.25 and idle < 0.25:
            return f"the rollouts: the learner waits for groups {waits:.0%} of its time; add rollouts"
        if waits > 0.25:
            return f"latency: the learner waits {waits:.0%} and the rollouts {idle:.0%}; raise max_staleness"
        return f"the learner: it computes {learner['compute']:.0%} of its time, the rollouts wait {idle:.0%}"


def _share(members: list[Listed]) -> dict[str, float] | None:
    """Shares of the time of all members of a service, but for what they took to start."""
    total = {bucket: sum(member.seconds.get(bucket, 0.0) for member in members) for bucket in BUCKETS}
    whole = sum(seconds for bucket, seconds in total.items() if bucket != "overhead")
    return {bucket: seconds / whole for bucket, seconds in total.items()} if whole > 0 else None


def _record(member: Listed, now: float) -> dict[str, Any]:
    hello = member.hello
    return {
        "instance": hello.instance,
        "service": hello.service,
        "host": hello.host,
        "pid": hello.pid,
        "state": member.state,
        "last_seen_s": round(now - member.last_seen, 3),
        "time": member.seconds,
        "figures": member.figures,
    }

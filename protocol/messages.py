"""The vocabulary of the wire: one class a message body. Every request is idempotent by the id of its message.

A body is a msgpack map with exactly the fields of its class; arrays travel beside it as columns (codec.py). Columns of
several groups in one message are named `<position of the group>/<column>`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.errors import ProtocolError

PROTOCOL_VERSION = 1

Name = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(max_length=65_536)]
Transport = Literal["shm", "gloo", "nccl", "stream"]
Service = Literal["rollout", "reward", "cost", "reference", "critic", "cost_critic", "learner", "broadcaster", "client"]


class Body(BaseModel):
    """Base of all bodies: unknown, missing and mistyped fields are refused.

    only_reads: it changes nothing, so its answer, which may be large, need not be remembered to be repeated.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    type: ClassVar[str]
    only_reads: ClassVar[bool] = False


class Hello(Body):
    """A service joins the run. Sent again after every reconnect; answered by Welcome."""

    type = "hello"
    service: Service
    stage: Name | None = Field(description="stage that it leases for; None for services that lease nothing")
    instance: Name
    host: Name
    pid: int
    protocol: int = PROTOCOL_VERSION
    address: Name | None = Field(None, description="where the service itself listens, if it does")


class Welcome(Body):
    """Everything a service needs to start."""

    type = "welcome"
    run_id: str
    run_folder: str = Field(description="absolute path on the broker's host")
    config: dict[str, Any]
    lineage: int
    version: int
    total_steps: int = Field(description="updates that the run is made of")
    heartbeat_s: float
    broker_epoch: str = Field(description="changes when the broker restarts: say hello again, leases are void")
    events_address: str = Field(description="PUB socket of the broker")
    listened: str | None = Field(None, description="where an instance of this name last listened, to do so again")


class Heartbeat(Body):
    """A sign of life that extends all leases of the instance, with its figures. Answered by Pulse."""

    type = "heartbeat"
    instance: str
    state: Literal["STARTING", "STALE", "SERVING", "DRAINING", "DEAD"]
    version: int = Field(-1, description="policy version of the weights that it holds, for a rollout")
    stats: dict[str, Any] = Field(default_factory=dict)


class Pulse(Body):
    """The truth about the run, for those who missed an event."""

    type = "pulse"
    lineage: int
    version: int
    broker_epoch: str
    draining: bool
    stop_reason: str | None = Field(description="set when the run has ended")
    gone: list[str] = Field(default=[], description="for the broadcaster: instances that left or fell silent")


class Locate(Body):
    """Ask where a service listens, waiting for it to join. Answered by Located."""

    type = "locate"
    service: Service
    wait_ms: int


class Located(Body):
    """The address asked for; None when the service did not join in time."""

    type = "located"
    address: str | None


class LeaseRequest(Body):
    """Ask for groups that are ready for a stage; waits until there are `min_groups` of them. Answered by Leased."""

    type = "lease"
    instance: str
    stage: str
    max_groups: int = Field(gt=0)
    min_groups: int = Field(1, gt=0)
    max_samples: int | None = Field(None, gt=0, description="most samples of the groups together, for the rollouts")
    wait_ms: int = Field(ge=0)


class Lease(Body):
    """One leased group."""

    type = "leased_group"
    lease_id: str
    group_id: str
    attempt: int
    lease_s: float = Field(description="time without a heartbeat after which the lease is lost")
    lane: Literal["train", "eval"]
    min_version: int
    prompt: dict[str, Any] | None = Field(description="None for the learner, which has it as tokens")


class Leased(Body):
    """Groups (0 to max) and, as columns, what the stage needs of them."""

    type = "leased"
    leases: list[Lease]


class Complete(Body):
    """The columns that a stage provides for a leased group. Answered by Ok, or the error `unknown_lease` when late."""

    type = "complete"
    lease_id: str
    group_id: str
    attempt: int


class Fail(Body):
    """A stage could not process a group. Answered by Ok."""

    type = "fail"
    lease_id: str
    group_id: str
    error: Text
    retry: bool = True


class Commit(Body):
    """The learner consumed these groups in the update that made `version`. Answered by Ok."""

    type = "commit"
    lineage: int
    version: int
    group_ids: list[str]
    metrics: dict[str, float] = Field(default_factory=dict)


class Checkpointed(Body):
    """A checkpoint of `version` is complete. Answered by Ok."""

    type = "checkpointed"
    lineage: int
    version: int
    location: str
    oldest: int = Field(description="oldest version that the run may go on from: the journal keeps what came after it")


class Resume(Body):
    """The learner goes on from `version`: what came after it is done again. Answered by Resumed."""

    type = "resume"
    version: int
    location: str = Field(description="of the checkpoint; empty where there is none, at version 0")


class Resumed(Body):
    """The lineage that the resumed run has."""

    type = "resumed"
    lineage: int


class StatusRequest(Body):
    """Ask for a snapshot of the run; `wait_version` waits until that version is committed. Answered by Status."""

    type = "status"
    only_reads = True
    wait_version: int | None = None
    wait_ms: int = 0


class Status(Body):
    """A snapshot of the run; the keys are described in protocol/SPEC.md."""

    type = "status_of_run"
    status: dict[str, Any]


class Drain(Body):
    """Admit nothing more; the run ends when the learner has saved. Answered by Ok."""

    type = "drain"
    reason: Text


class DeadLettersRequest(Body):
    """Ask for the groups that failed too often. Answered by DeadLetters."""

    type = "dead_letters"
    only_reads = True


class DeadLetters(Body):
    """Plain records with group_id, lane, stage, prompt and errors, oldest first."""

    type = "dead_letters_of_run"
    letters: list[dict[str, Any]]


class Requeue(Body):
    """Give the prompts of dead letters back to the source. Answered by Requeued."""

    type = "requeue"
    group_ids: list[str] | None = Field(description="None: of all")


class Requeued(Body):
    """How many prompts will be drawn again."""

    type = "requeued"
    count: int


class Leave(Body):
    """An instance leaves; its leases go back at once. Answered by Ok. `error` says why, if it is not the run's end."""

    type = "leave"
    instance: Name
    error: Text | None = None


class Ok(Body):
    """Done."""

    type = "ok"


class Refused(Body):
    """Nothing was changed. `code` is one of those in SPEC.md."""

    type = "error"
    code: str
    detail: str


class AcquireSlot(Body):
    """The learner asks the broadcaster for a snapshot slot to write. Answered by Slot."""

    type = "acquire_slot"
    path: str = Field(description="shared-memory file, a name below the host's shared-memory folder")
    is_new: bool = Field(description="whether nothing in the file was ever published")
    lineage: int
    version: int
    wait_ms: int


class Slot(Body):
    """The slot that may be written; None when all are still read after the wait, with those who read them."""

    type = "slot"
    slot: int | None
    held_by: list[str]


class Publish(Body):
    """A snapshot is complete in its slot. Answered by Ok."""

    type = "publish"
    path: str = Field(description="as in AcquireSlot")
    slot: int
    lineage: int
    version: int
    manifest: dict[str, Any]


class Follow(Body):
    """A rollout tells which snapshot it has and waits for a newer one. Answered by Offer.

    path, slot: what it reads in the learner's shared memory, and nothing else from this moment on; None where it reads
    nothing there. lineage, version: of its weights; -1 where it has none.
    """

    type = "follow"
    instance: Name
    path: str | None
    slot: int | None
    lineage: int
    version: int
    wait_ms: int
    transports: list[Transport] = Field(["shm"], description="the ways it can take a snapshot")


class Round(Body):
    """A collective broadcast of one snapshot, and a rollout's part in it."""

    type = "round"
    epoch: Name = Field(description="of the group: another one means that it is to be made anew")
    rank: int = Field(gt=0, description="0 is the broadcaster")
    size: int = Field(gt=1)
    port: int = Field(gt=0, lt=65536, description="of the rendezvous, on the broadcaster's host")
    delta_bytes: list[int] | None = Field(description="of each bucket's delta, 0: as it was; None: whole buckets")


class Offer(Body):
    """The latest snapshot, now held for the rollout; slot None when there is no newer one."""

    type = "offer"
    path: str | None
    slot: int | None
    lineage: int
    version: int
    manifest: dict[str, Any] | None
    transport: Transport = "shm"
    round: Round | None = Field(None, description="of a collective transport")


class Join(Body):
    """A rollout has made room for what the round brings. Answered by Ok once all members have, or by `aborted`."""

    type = "join"
    instance: Name
    epoch: str
    lineage: int
    version: int
    size_bytes: int = Field(description="of the snapshot, on which all must agree")


class Fetch(Body):
    """Ask for one bucket of the snapshot that was offered. Answered by Bucket with the column `bytes`."""

    type = "fetch"
    only_reads = True
    instance: str
    lineage: int
    version: int
    bucket: int = Field(ge=0)
    base_lineage: int = Field(description="with base_version: what a delta may start from; version -1: nothing")
    base_version: int


class Bucket(Body):
    """One bucket: all of it, or what changed since the base."""

    type = "bucket"
    is_delta: bool


class Learn(Body):
    """The learner makes `version` of these groups; a critic learns their returns. Answered by Learned.

    Columns of each group: `prompt_tokens`, `tokens`, `tokens_offsets`, `loss_mask`, `values` (f4 [T], from before) and
    `returns` (f4 [T]). Refused with `other_version` where the critic is not at the version before.
    """

    type = "learn"
    version: int
    groups: int = Field(ge=0)


class Learned(Body):
    """The metrics of a critic's update."""

    type = "learned"
    metrics: dict[str, float]


class Store(Body):
    """A critic shall save its state, which belongs to `version`; the learner saves next. Answered by Ok."""

    type = "store"
    lineage: int
    version: int


class GoBack(Body):
    """A critic shall go on from what it saved for `version`; 0: from the beginning. Answered by Ok."""

    type = "go_back"
    version: int = Field(ge=0)


class ScoreRequest(Body):
    """A reward service asks a reward server of the user for scores. Answered by Scores."""

    type = "score"
    samples: list[dict[str, Any]] = Field(description="arguments of each sample: prompt, messages, completion, …")


class Scores(Body):
    """A score for each sample: a number, nil to abstain, or a map with the reason under `invalid`."""

    type = "scores"
    scores: list[float | dict[str, str] | None]


class Event(Body):
    """A hint on the PUB socket; the truth is what a Pulse says."""

    type = "event"
    kind: Literal["version", "drain", "shutdown", "config_note"]
    lineage: int
    version: int
    note: str = ""


BODIES: dict[str, type[Body]] = {body.type: body for body in Body.__subclasses__()}


def parse_body(type_name: str, fields: dict[str, Any]) -> Body:
    """The typed body of a message. Raises ProtocolError `unknown_type` or `bad_header`."""
    body = BODIES.get(type_name)
    if body is None:
        raise ProtocolError("unknown_type", f"there is no message type {type_name[:64]!r}")
    try:
        return body.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError("bad_header", f"{type_name}.{where}: {first['msg']}") from None

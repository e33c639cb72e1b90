"""TensorBoard's event files and Weights & Biases, fed by a broker over real sockets."""

from __future__ import annotations

import math
import struct
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest

from protocol.messages import Commit, Ok, Resume, Resumed
from services.broker import tensorboard
from services.broker.tensorboard import EventFile
from services.broker.trackers import Trackers
from shared.errors import ConfigError

from .test_server import Played, cast, config_of, killed, make_ready, running  # noqa: F401 (a fixture)

WRITTEN_BY_TENSORBOARD = bytes.fromhex(
    "1800000000000000a37f4b220900001040fc54d9411a0d627261696e2e4576656e743a32338d2fe9"
    "100000000000000095fbfe180900001040fc54d94110ad023a020801cb79b93b"
    "d6000000000000004d151adf0900001040fc54d94110ad022ac7010a120a0b7265776172642f6d65616e150000803e0ab0010aa801"
    + "7369676e616c2f6772c3b6c39f65" * 12
    + "15000040c01fd4b49e"
)
"""By its own RecordWriter and messages: version, start of a session, and two values of step 301."""


def fields(message):
    """The (number, content) of each field of a Protocol Buffers message."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            value |= (message[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if message[at - 1] < 0x80:
                return value

    while at < len(message):
        number, wire = divmod(varint(), 8)
        size = {0: 0, 1: 8, 5: 4}.get(wire)
        if size is None:
            size = varint()
        yield number, varint() if wire == 0 else message[at : at + size]
        at += size


def shown(folder):
    """What TensorBoard shows: by tag, (step, value) in their order, without what a later session made anew."""
    found = defaultdict(list)
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event, data = dict(fields(data[12 : 12 + size])), data[16 + size :]
            if 7 in event:
                for tag, points in found.items():
                    found[tag] = [point for point in points if point[0] < event[2]]
            for _, value in fields(event.get(5, b"")):
                parts = dict(fields(value))
                found[parts[1].decode()].append((event[2], *struct.unpack("<f", parts[2])))
    return found


def test_records_are_those_that_tensorboard_writes_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorboard.time, "time", lambda: 1700000000.25)
    file = EventFile(tmp_path, 300)
    file.log(301, {"reward/mean": 0.25, "signal/größe" * 12: -3.0})
    file.close()
    assert next(tmp_path.iterdir()).read_bytes() == WRITTEN_BY_TENSORBOARD


def test_figures_that_float32_does_not_hold_are_the_largest_it_has(tmp_path):
    file = EventFile(tmp_path, 0)
    file.log(1, {"big": 1e300, "small": -1e300, "inf": math.inf, "nan": math.nan})
    values = {tag: points[0][1] for tag, points in shown(tmp_path).items()}
    file.close()
    assert values["big"] == -values["small"] == 2.0**128 - 2.0**104 and values["inf"] == math.inf
    assert math.isnan(values["nan"])


async def test_a_killed_broker_and_a_rewound_run_leave_every_step_once(tmp_path, columns_of, killed):  # noqa: F811
    config = config_of(tmp_path, rows=20, heldout=2, max_staleness=2, steps=6)
    folder = tmp_path / "run" / "tensorboard"
    async with killed(config, tmp_path) as (broker, client):
        rollout, reward, learner = await cast(client, columns_of)
        for version in (1, 2, 3):
            await rollout.beat(version=version - 1)
            await make_ready(rollout, reward, version - 1)
            await learner.commit(version, await learner.lease(2, min_groups=2), {"loss": version / 4})
        assert shown(folder)["loss"] == [(1, 0.25), (2, 0.5), (3, 0.75)]  # there before anything is closed
        broker.run_state._trackers.log(4, {"loss": 99.0})  # of a commit that the journal did not get any more
    async with running(config, tmp_path) as (_, client, _task):
        learner = Played(client, "learner", columns_of)
        await learner.join()
        assert shown(folder)["loss"] == [(1, 0.25), (2, 0.5), (3, 0.75)]
        await client.request(Resume(version=1, location="/c"), Resumed)
        assert shown(folder)["loss"] == [(1, 0.25)]
        again = [lease.group_id for lease, _ in await learner.lease(2, min_groups=2)]
        await client.request(Commit(lineage=1, version=2, group_ids=again, metrics={"loss": 0.625}), Ok)
    figures = shown(folder)
    assert figures["loss"] == [(1, 0.25), (2, 0.625)] and figures["signal/exact"] == [(1, 1.0), (2, 1.0)]
    assert figures["evaluation/accuracy"] == [(0, 1.0), (1, 1.0)]


async def test_without_tensorboard_there_are_no_event_files(tmp_path):
    async with running(config_of(tmp_path, metrics={"tensorboard": False}), tmp_path):
        assert not (tmp_path / "run" / "tensorboard").exists()


class FakeWandb(SimpleNamespace):
    """The part of wandb that is used, which keeps what it is told."""

    Error = type("Error", (Exception,), {})
    Settings = dict

    def __init__(self):
        super().__init__(begun=[], told=[], finished=False, fault=None)

    def init(self, **arguments):
        if self.fault is not None:
            raise self.fault
        self.begun.append(arguments)
        return self

    def define_metric(self, name, step_metric):
        assert (name, step_metric) == ("*", "version")

    def log(self, record):
        if self.fault is not None:
            raise self.fault
        self.told.append(record)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


async def test_wandb_is_told_every_version_and_failing_does_not_end_the_run(tmp_path, columns_of, wandb):
    config = config_of(tmp_path, rows=20, steps=6, metrics={"wandb": "my-project"})
    async with running(config, tmp_path) as (broker, client, _):
        rollout, reward, learner = await cast(client, columns_of)
        for version in (1, 2):
            await rollout.beat(version=version - 1)
            await make_ready(rollout, reward, version - 1)
            await learner.commit(version, await learner.lease(2, min_groups=2), {"loss": version / 4})
            wandb.fault = RuntimeError("no disk") if version == 1 else None
        assert [(r["version"], r["loss"], r["signal/exact"], r["lineage"]) for r in wandb.told] == [(1, 0.25, 1.0, 0)]
        assert "Wandb is told nothing more: RuntimeError: no disk" in broker.status()["warnings"]
        assert shown(tmp_path / "run" / "tensorboard")["loss"] == [(1, 0.25), (2, 0.5)]
        run_id = broker.run_state.run_id
    (begun,) = wandb.begun
    assert (begun["project"], begun["id"], begun["dir"]) == ("my-project", run_id, tmp_path / "run")
    assert begun["config"]["prompts_per_step"] == 2


async def test_wandb_is_finished_with_the_run(tmp_path, wandb):
    async with running(config_of(tmp_path, metrics={"wandb": "my-project"}), tmp_path):
        assert not wandb.finished
    assert wandb.finished


def test_wandb_that_is_not_installed_or_cannot_begin_is_an_error_of_a_new_run_alone(tmp_path, monkeypatch, wandb):
    config = config_of(tmp_path, metrics={"wandb": "my-project", "tensorboard": False})
    warnings = []
    wandb.fault = wandb.Error("no API key")
    with pytest.raises(ConfigError, match="wandb cannot begin: no API key; WANDB_MODE=offline"):
        Trackers(config, tmp_path, "r", 0, warnings.append)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb, which is not installed: pip install"):
        Trackers(config, tmp_path, "r", 0, warnings.append)
    assert not warnings
    Trackers(config, tmp_path, "r", 7, warnings.append)
    assert warnings == ["metrics.wandb needs wandb, which is not installed: pip install 'stretto[wandb]'"]

"""Snapshots in shared memory: views without copies, checksums, and a reader that sees its slot go."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shared.errors import ProtocolError, WeightsError
from shared.snapshot import Layout, Manifest, SnapshotFile

SHAPES = {"embed": (5, 7), "norm": (3,), "deep.weight": (2, 3, 4)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STRETTO_SHM", str(tmp_path))
    return tmp_path


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def layout(request):
    return Layout.of(SHAPES, request.param)


def filled(file: SnapshotFile, slot: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(slot)
    for tensor in file.tensors(slot).values():
        tensor.copy_(torch.randn(tensor.shape))
    return {name: tensor.clone() for name, tensor in file.tensors(slot).items()}


def test_what_one_side_writes_the_other_reads_in_place(folder, layout):
    writer = SnapshotFile.create("weights", layout, 3)
    reader = SnapshotFile.attach("weights", layout)
    written = filled(writer, 1)
    for name, tensor in reader.tensors(1).items():
        assert torch.equal(tensor, written[name]) and tensor.shape == SHAPES[name]
    writer.tensors(1)["norm"].fill_(4)
    assert reader.tensors(1)["norm"].tolist() == [4, 4, 4]


def test_slots_and_tensors_do_not_touch_each_other(folder, layout):
    file = SnapshotFile.create("weights", layout, 3)
    written = [filled(file, slot) for slot in range(3)]
    for slot in range(3):
        for name, tensor in file.tensors(slot).items():
            assert torch.equal(tensor, written[slot][name])


def test_a_damaged_bucket_is_found(folder):
    layout = Layout.of({"w": (3000,)}, "float32")
    file = SnapshotFile.create("weights", layout, 3)
    filled(file, 0)
    manifest = Manifest(layout, 4096, file.checksums(0, 4096), [1, 2], [-1.0])
    file.verify(0, manifest)
    file.tensors(0)["w"][1500] += 1
    with pytest.raises(WeightsError, match="1 of 3 buckets of slot 0"):
        file.verify(0, manifest)


def test_a_reader_sees_that_its_slot_was_taken_away(folder, layout):
    writer = SnapshotFile.create("weights", layout, 3)
    reader = SnapshotFile.attach("weights", layout)
    assert not reader.holds(2, 0, 7)
    writer.begin(2)
    writer.seal(2, 0, 7)
    assert reader.holds(2, 0, 7) and not reader.holds(2, 1, 7)
    writer.begin(2)
    assert not reader.holds(2, 0, 7)


def test_a_manifest_survives_the_wire(layout):
    size = layout.size_bytes
    manifest = Manifest(layout, size, [2**64 - 1], [5, 6, 7], [-0.5, -1.25])
    assert Manifest.from_wire(manifest.to_wire()) == manifest


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": [["w", "float32", [4, 4], 2**40]]},
        {"tensors": [["w", "float32", [-4], 0]]},
        {"tensors": [["w", "object", [4], 0]]},
        {"tensors": [["w", "float32", [4]]]},
        {"tensors": [["w", "float32", [4], 3]]},
        {"checksums": []},
        {"bucket_bytes": 0},
        {"probe_logprobs": [-1.0]},
        {"size_bytes": "many"},
        {"size_bytes": math.inf},
        {"size_bytes": 0, "tensors": [], "checksums": []},
        {"probe_tokens": [1], "probe_logprobs": []},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_manifest_from_a_stranger_is_refused(change):
    layout = Layout.of({"w": (4,)}, "float32")
    wire = Manifest(layout, layout.size_bytes, [1], [5, 6, 7], [-0.5, -1.25]).to_wire()
    with pytest.raises(ProtocolError, match="bad_header"):
        Manifest.from_wire(wire | change)


@pytest.mark.parametrize("name", ["../etc/passwd", "/etc/passwd", "", ".hidden", "a/b", "x" * 200])
def test_a_name_from_the_wire_is_never_a_path(folder, name):
    with pytest.raises(ProtocolError, match="is not a name of a snapshot file"):
        SnapshotFile.attach(name, Layout.of(SHAPES, "float32"))


def test_a_missing_file_or_another_model_is_named(folder):
    with pytest.raises(WeightsError, match="must share the learner's host"):
        SnapshotFile.attach("weights", Layout.of(SHAPES, "float32"))
    SnapshotFile.create("weights", Layout.of(SHAPES, "float32"), 3)
    with pytest.raises(WeightsError, match="does not hold snapshots of this model"):
        SnapshotFile.attach("weights", Layout.of(SHAPES | {"more": (1,)}, "float32"))


def test_too_little_shared_memory_says_how_much_is_missing(folder):
    with pytest.raises(WeightsError, match="do not fit into"):
        SnapshotFile.create("weights", Layout.of({"w": (1 << 40,)}, "float32"), 3)


def test_the_snapshots_of_a_killed_learner_are_removed_and_those_in_use_are_kept(folder):
    layout = Layout.of(SHAPES, "float32")
    (folder / "stretto-notes").write_text("not snapshots")
    in_use = SnapshotFile.create("stretto-in-use", layout, 3)
    killed = (
        "import os, signal; from shared.snapshot import Layout, SnapshotFile\n"
        "file = SnapshotFile.create('stretto-killed', Layout.of({'w': (4,)}, 'float32'), 3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", killed], cwd=Path(__file__).parents[2], timeout=60)
    assert (folder / "stretto-killed").exists()
    new = SnapshotFile.create("stretto-new", layout, 3)
    assert {p.name for p in folder.iterdir()} == {"stretto-notes", in_use.path.name, new.path.name}

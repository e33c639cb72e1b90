"""Checkpoints: what is saved goes on as if nothing had happened."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.compute.checkpoint import Checkpoints, capture, restore
from services.compute.hf import HFBackend
from services.learner.trainer import Trainer
from shared.algorithms.grpo import GRPO
from shared.config import Checkpoint, load_config
from shared.errors import DataError

from ..conftest import make_config, make_group


def steps(trainer, seeds) -> None:
    for seed in seeds:
        trainer.step([make_group(seed * 10 + i) for i in range(3)])
        trainer.backend.use_snapshot(None)


def loaded(folder, **changes) -> Trainer:
    config = make_config(folder, **changes)
    return Trainer(config, HFBackend.load(str(folder), config.learner), GRPO(), total_steps=10)


def test_training_goes_on_bit_by_bit_from_a_checkpoint(new_trainer, tmp_path):
    learner = {"dtype": "bfloat16", "lr": 1e-3, "schedule": "cosine", "warmup_steps": 2}
    whole = new_trainer(learner=learner)
    steps(whole, range(6))
    first = new_trainer(learner=learner)
    steps(first, range(3))
    folder = Checkpoints(tmp_path, Checkpoint(keep_last=2)).save(first, lineage=4)
    second = loaded(folder, learner=learner)
    restore(folder, second)
    assert (second.version, second.optimizer.lr) == (3, first.optimizer.lr)
    steps(second, range(3, 6))
    for name, parameter in whole.backend.parameters.items():
        assert torch.equal(parameter, second.backend.parameters[name]), name


def test_a_checkpoint_holds_what_was_there_when_it_was_copied_however_long_writing_takes(new_trainer, tmp_path):
    trainer = new_trainer(learner={"dtype": "bfloat16", "lr": 1e-3})
    steps(trainer, range(2))
    before = {name: p.detach().clone() for name, p in trainer.backend.parameters.items()}
    moments = {n: trainer.optimizer.adamw.state[p]["exp_avg_sq"].clone() for n, p in trainer.backend.parameters.items()}
    captured, rng = capture(trainer, lineage=1), torch.get_rng_state()
    steps(trainer, range(2, 4))
    torch.rand(3)
    folder = Checkpoints(tmp_path, Checkpoint()).write(captured)
    again = loaded(folder, learner={"dtype": "bfloat16", "lr": 1e-3})
    restore(folder, again)
    assert (folder.name, again.version, again.optimizer.steps) == ("checkpoint-2", 2, 2)
    assert torch.equal(torch.get_rng_state(), rng)
    for name, parameter in again.backend.parameters.items():
        assert torch.equal(parameter, before[name]), name
        assert torch.equal(again.optimizer.adamw.state[parameter]["exp_avg_sq"], moments[name]), name


def test_a_checkpoint_is_a_hugging_face_folder(new_trainer, tmp_path):
    trainer = new_trainer()
    steps(trainer, [1])
    folder = Checkpoints(tmp_path, Checkpoint(keep_last=1)).save(trainer, lineage=0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trainer.backend.parameters[name])
    assert AutoTokenizer.from_pretrained(folder).decode([72, 73])
    assert load_config(folder / "run.yaml") == trainer.config


def test_only_the_newest_are_kept(new_trainer, tmp_path):
    trainer = new_trainer()
    checkpoints = Checkpoints(tmp_path, Checkpoint(keep_last=2))
    for seed in range(3):
        steps(trainer, [seed])
        checkpoints.save(trainer, lineage=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]
    assert checkpoints.latest().name == "checkpoint-3"


def test_some_are_kept_for_good_but_the_run_goes_on_from_the_newest_alone(new_trainer, tmp_path):
    trainer = new_trainer()
    checkpoints = Checkpoints(tmp_path, Checkpoint(keep_last=2, keep_every=3))
    for seed in range(6):
        steps(trainer, [seed])
        checkpoints.save(trainer, lineage=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-5", "checkpoint-6"]
    assert checkpoints.oldest() == 5
    assert checkpoints.at(3).name == "checkpoint-3"
    with pytest.raises(DataError, match="no checkpoint of version 4; there are: 3, 5, 6"):
        checkpoints.at(4)


def test_a_checkpoint_that_was_not_finished_is_not_the_latest(new_trainer, tmp_path):
    checkpoints = Checkpoints(tmp_path, Checkpoint(keep_last=2))
    assert checkpoints.latest() is None
    trainer = new_trainer()
    steps(trainer, [1])
    kept = checkpoints.save(trainer, lineage=0)
    (tmp_path / ".checkpoint-9.partial").mkdir()
    (tmp_path / "checkpoint-9").mkdir()
    assert checkpoints.latest() == kept
    checkpoints.save(trainer, lineage=0)
    assert not (tmp_path / ".checkpoint-9.partial").exists()


def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(new_trainer, tmp_path):
    trainer = new_trainer()
    steps(trainer, [1])
    folder = Checkpoints(tmp_path, Checkpoint(keep_last=1)).save(trainer, lineage=0)
    state = json.loads((folder / "stretto.json").read_text())
    (folder / "stretto.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(DataError, match="has format 99; this version reads 1"):
        restore(folder, trainer)
    (folder / "stretto.json").write_text(json.dumps(state))
    (folder / "optimizer.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match="checkpoint-1 cannot be read"):
        restore(folder, trainer)


def test_optimizer_state_that_is_not_whole_is_refused_by_the_name_of_its_weight(new_trainer, tmp_path):
    trainer = new_trainer()
    steps(trainer, [1])
    folder = Checkpoints(tmp_path, Checkpoint(keep_last=1)).save(trainer, lineage=0)
    tensors = load_file(folder / "optimizer.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "exp_avg.model.norm.weight"}, folder / "optimizer.safetensors")
    with pytest.raises(DataError, match=r"optimizer state of model\.norm\.weight in .* is not whole"):
        restore(folder, trainer)
    save_file({k: v for k, v in tensors.items() if k != "rng"}, folder / "optimizer.safetensors")
    with pytest.raises(DataError, match="checkpoint-1 lacks 'rng'"):
        restore(folder, trainer)

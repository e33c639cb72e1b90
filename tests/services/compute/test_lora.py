"""LoRA: an adapter is trained, and nothing else; snapshots are of the whole model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.compute.checkpoint import Checkpoints
from services.compute.hf import HFBackend
from services.compute.lora import merge
from services.learner.trainer import Trainer, load_trainer
from shared.algorithms.advantages import grpo
from shared.config import Checkpoint
from shared.errors import ConfigError, DataError

from ..conftest import make_config, make_group

LORA = {"rank": 4, "alpha": 8}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}


def new(model, *, lora=LORA, checkpoint=None, **learner) -> Trainer:
    learner = {"dtype": "float32", "lora": lora} | ADAMW | learner
    algorithm = {"name": "grpo", "aggregation": "token_mean"}
    return load_trainer(make_config(model, learner=learner, algorithm=algorithm), 10, checkpoint)


def steps(trainer: Trainer, seeds) -> None:
    for seed in seeds:
        trainer.step([make_group(10 * seed + i) for i in range(3)])


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    tensors = {name: torch.full(shape, torch.nan) for name, shape in trainer.backend.shapes.items()}
    trainer.backend.write_snapshot(tensors)
    trainer.backend.use_snapshot(tensors)
    return tensors


def own_logprobs(model, group) -> list[torch.Tensor]:
    """Of each sample by itself, as anybody would compute them."""
    found = []
    for tokens in group.samples("tokens"):
        ids = torch.tensor([[*group.columns["prompt_tokens"], *tokens]])
        logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), -1)
        found.append(logprobs.gather(-1, ids[0, 1:, None])[-len(tokens) :, 0])
    return found


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_steps_are_those_of_plain_peft_and_torch(tiny_model, targets):
    ours = new(tiny_model, lora=LORA | {"target_modules": targets}, gradient_checkpointing=True)
    torch.manual_seed(ours.config.seed)
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules=targets if isinstance(targets, str) else list(targets)),
    ).eval()
    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, **ADAMW)
    for seed in range(3):
        groups = [make_group(10 * seed + i) for i in range(3)]
        loss, n_tokens = torch.zeros(()), sum(len(group.columns["tokens"]) for group in groups)
        for group in groups:
            logprobs = own_logprobs(theirs, group)
            group.columns["behavior_logprobs"] = torch.cat(logprobs).detach().numpy()  # so that the ratio is 1
            for advantage, of_sample in zip(grpo(group.columns["rewards"].astype("f8")), logprobs, strict=True):
                loss = loss - float(advantage) * of_sample.sum() / n_tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adamw.step()
        adamw.zero_grad()
        assert ours.step(groups)["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, parameter in ours.backend.parameters.items():
        expected = theirs.get_parameter(f"base_model.model.{name}")
        torch.testing.assert_close(parameter.detach(), expected.detach(), atol=1e-6, rtol=1e-6)
    merged = theirs.merge_and_unload()
    for name, tensor in snapshot(ours).items():
        torch.testing.assert_close(tensor, merged.get_parameter(name).detach(), atol=1e-6, rtol=1e-6)


def test_only_the_adapter_is_trained_and_has_optimizer_state(tiny_model):
    trainer = new(tiny_model)
    before = {name: weight.detach().clone() for name, weight in trainer.backend._model.named_parameters()}
    steps(trainer, [1, 2])
    adapter = sum(parameter.numel() for parameter in trainer.backend.parameters.values())
    state = [t for of_one in trainer.optimizer.adamw.state.values() for t in of_one.values() if t.dim() > 0]
    assert sum(tensor.nbytes for tensor in state) == 8 * adapter
    whole = sum(np.prod(shape) for shape in trainer.backend.shapes.values())
    assert adapter < whole / 2
    for name, weight in trainer.backend._model.named_parameters():
        assert torch.equal(before[name], weight) == (".lora_" not in name), name
        assert (weight.grad is None) or ".lora_" in name
    changed = {n for n, tensor in snapshot(trainer).items() if not torch.equal(tensor, before.get(n, torch.zeros(())))}
    assert changed == {name.replace(".base_layer", "") for name in before if ".base_layer" in name}


def test_a_snapshot_has_the_weights_of_the_same_model_without_an_adapter(tiny_model):
    plain = HFBackend.load(str(tiny_model), make_config().learner)
    trainer = new(tiny_model)
    assert trainer.backend.shapes == plain.shapes
    for name, tensor in snapshot(trainer).items():  # a new adapter changes nothing
        assert torch.equal(tensor, plain.parameters[name]), name


def test_in_bfloat16_the_model_is_bfloat16_and_the_adapter_float32(tiny_model):
    trainer = new(tiny_model, dtype="bfloat16")
    steps(trainer, [1])
    dtypes = {".lora_" in name: weight.dtype for name, weight in trainer.backend._model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    tokens = trainer.backend.probe_tokens(16)
    served = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    served.load_state_dict(snapshot(trainer), strict=False)
    logprobs = torch.log_softmax(served(torch.tensor([tokens])).logits[0, :-1].float(), -1)
    theirs = logprobs.gather(-1, torch.tensor(tokens)[1:, None])[:, 0].detach().numpy()
    assert np.abs(trainer.backend.score(tokens) - theirs).mean() < 0.12  # as `weights.tolerance`


def test_training_goes_on_bit_by_bit_from_a_checkpoint_which_is_a_peft_folder(tiny_model, tmp_path):
    whole, first = new(tiny_model), new(tiny_model)
    steps(whole, range(5))
    steps(first, range(3))
    folder = Checkpoints(tmp_path, Checkpoint()).save(first, lineage=0)
    assert not (folder / "model.safetensors").exists()
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        assert ".lora_" in name and tensor.dtype == torch.float32
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    merge(folder, tmp_path / "merged")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for name, tensor in snapshot(first).items():
        torch.testing.assert_close(merged.get_parameter(name).detach(), tensor, atol=1e-6, rtol=0)
        torch.testing.assert_close(exported.get_parameter(name).detach(), tensor, atol=1e-6, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").decode([72, 73])
    second = new(tiny_model, checkpoint=folder)
    assert second.version == 3
    steps(second, range(3, 5))
    for name, parameter in whole.backend.parameters.items():
        assert torch.equal(parameter, second.backend.parameters[name]), name


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        (None, "holds an adapter, and learner.lora is not set"),
        (LORA | {"rank": 8}, "of rank 4 and alpha 8; the run's is one to .*, of rank 8 and alpha 8"),
        (LORA | {"target_modules": ["q_proj"]}, "is at other layers than learner.lora.target_modules"),
        (LORA | {"target_modules": ["q_proj", "lm_head"]}, "lm_head is no linear layer with weights of its own"),
        (LORA | {"target_modules": ["embed_tokens"]}, "embed_tokens is no linear layer with weights of its own"),
        (LORA | {"target_modules": ["query"]}, "learner.lora.target_modules: Target modules .*query"),
    ],
)
def test_another_adapter_than_that_of_the_checkpoint_is_refused(tiny_model, tmp_path, lora, says):
    folder = Checkpoints(tmp_path, Checkpoint()).save(new(tiny_model), lineage=0)
    with pytest.raises(ConfigError, match=says):
        new(tiny_model, lora=lora, checkpoint=folder)


def test_a_whole_model_is_no_adapter(tiny_model, tmp_path):
    folder = Checkpoints(tmp_path, Checkpoint()).save(new(tiny_model, lora=None), lineage=0)
    with pytest.raises(DataError, match=r"holds a whole model, and learner\.lora is set"):
        new(tiny_model, checkpoint=folder)
    with pytest.raises(DataError, match=f"cannot merge the adapter in {folder}"):
        merge(folder, tmp_path / "merged")

"""The Hugging Face backend: what it computes with, and which models it refuses."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer, GraniteConfig, GraniteForCausalLM

from services.compute.hf import HFBackend
from services.compute.packing import micro_batches, pack
from shared.errors import DataError

from ..conftest import make_config
from .test_packing import group_of


def slots(backend, dtype) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(master.shape, dtype=dtype) for name, master in backend.parameters.items()}


def gradients(backend) -> torch.Tensor:
    (rows,) = micro_batches([group_of(6, [9, 4, 7])], 1000)
    backend.logprobs(pack(rows), 1.0)[0].sum().backward()
    backend.collect_gradients()
    return torch.cat([parameter.grad.reshape(-1) for parameter in backend.parameters.values()])


def test_the_compute_weights_are_views_on_the_snapshot(backend):
    tokens = backend.probe_tokens(12)
    own = backend.score(tokens)
    tensors = slots(backend, torch.float32)
    backend.write_snapshot(tensors)
    backend.use_snapshot(tensors)
    assert (backend.score(tokens) == own).all()
    tensors["model.norm.weight"].zero_()
    assert not (backend.score(tokens) == own).all()


def test_a_snapshot_of_another_dtype_leaves_the_compute_weights_in_theirs(backend):
    own = backend.score(backend.probe_tokens(12))
    tensors = slots(backend, torch.bfloat16)
    backend.write_snapshot(tensors)
    backend.use_snapshot(tensors)
    assert (backend.score(backend.probe_tokens(12)) == own).all()


def test_a_tied_head_stays_the_embedding_and_gets_both_gradients(backend):
    assert "lm_head.weight" not in backend.parameters
    tensors = slots(backend, torch.float32)
    backend.write_snapshot(tensors)
    backend.use_snapshot(tensors)
    model = backend._model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    gradients(backend)
    unseen = 300  # no token of the batch: only the head's softmax reaches its row
    assert backend.parameters["model.embed_tokens.weight"].grad[unseen % len(model.lm_head.weight)].any()


def test_the_scores_are_the_models_own(backend):
    tokens = backend.probe_tokens(12)
    ids = torch.tensor([tokens])
    own = torch.log_softmax(backend._model(ids).logits[0, :-1].float(), -1).gather(-1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(backend.score(tokens)), own.detach())


def test_gradient_checkpointing_computes_layers_twice_for_the_same_gradients(tiny_model):
    def run(checkpointing: bool) -> tuple[torch.Tensor, int]:
        config = make_config(learner={"dtype": "float32", "gradient_checkpointing": checkpointing})
        backend = HFBackend.load(str(tiny_model), config.learner)
        calls = []
        backend._model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        return gradients(backend), len(calls)

    plain, once = run(False)
    checkpointed, twice = run(True)
    assert (once, twice) == (1, 2)
    torch.testing.assert_close(checkpointed, plain)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_off_while_training(tiny_model, checkpointing):
    config = make_config(learner={"dtype": "float32", "gradient_checkpointing": checkpointing})
    backend = HFBackend.load(str(tiny_model), config.learner)
    for layer in backend._model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    (rows,) = micro_batches([group_of(6, [9, 4, 7])], 1000)
    first, second = (backend.logprobs(pack(rows), 1.0)[0].detach() for _ in range(2))
    assert torch.equal(first, second)


def test_a_model_whose_logits_are_scaled_is_refused(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    config = GraniteConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logits_scaling=8.0,
        initializer_range=1.0,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"GraniteForCausalLM\) gives other log-probs than its lm_head alone"):
        HFBackend.load(str(tmp_path), make_config().learner)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(DataError, match=f"cannot load the model {tmp_path}"):
        HFBackend.load(str(tmp_path), make_config().learner)

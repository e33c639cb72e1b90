"""A critic: its values, its loss and gradient, and what a checkpoint keeps."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForSequenceClassification

from services.compute.checkpoint import Checkpoints, restore
from services.compute.hf import HFCritic
from services.compute.inference import number_tokens
from services.compute.memory import Room
from services.critic.trainer import CriticTrainer
from shared.config import Checkpoint, Critic
from shared.errors import StrettoError

from ..conftest import make_config, make_group


def new_critic(model, **changes) -> CriticTrainer:
    settings = Critic(**({"dtype": "float32", "lr": 1e-2} | changes))
    return CriticTrainer(
        make_config(), settings, HFCritic.load(str(model), settings), Room("critic", settings), total_steps=20
    )


def lesson(seed: int, returns: float | None = None) -> dict:
    """A group with old values of 0 and returns that are random, or all alike."""
    random = np.random.default_rng(seed)
    group = make_group(seed).columns
    n = len(group["tokens"])
    columns = {name: group[name] for name in ("prompt_tokens", "tokens", "tokens_offsets", "loss_mask")}
    target = random.normal(size=n) if returns is None else np.full(n, returns)
    return columns | {"values": np.zeros(n, dtype="f4"), "returns": target.astype("f4")}


def values(critic: CriticTrainer, *lessons: dict, budget: int = 10_000) -> list[np.ndarray]:
    return number_tokens(critic.values, lessons, Room("critic", Critic(tokens_per_micro_batch=budget)))


def test_a_new_head_values_every_state_at_0_and_learns(tiny_model):
    critic = new_critic(tiny_model, clip_value=None)
    lessons = [lesson(seed, returns=0.7) for seed in range(3)]
    assert not any(part.any() for part in values(critic, *lessons))
    losses = [critic.learn(lessons)["loss"] for _ in range(12)]
    assert losses[0] == pytest.approx(0.7**2 / 2, rel=1e-5)
    assert losses[-1] < 0.1 * losses[0]
    assert critic.version == 12


@pytest.mark.parametrize("budget", [60, 25, 1])
def test_values_and_gradient_are_the_same_however_a_step_is_split(tiny_model, budget):
    lessons = [lesson(seed) for seed in range(3)]

    def gradient(budget: int) -> tuple[torch.Tensor, list[np.ndarray]]:
        critic = new_critic(tiny_model, tokens_per_micro_batch=budget)
        critic.learn(lessons)  # so that the head is not 0
        before = {name: p.detach().clone() for name, p in critic.backend.parameters.items()}
        critic.optimizer.step = lambda: torch.zeros(())
        critic.learn(lessons)
        assert all(torch.equal(before[name], p) for name, p in critic.backend.parameters.items())
        found = torch.cat([p.grad.reshape(-1) for p in critic.backend.parameters.values() if p.grad is not None])
        return found, values(critic, *lessons, budget=budget)

    whole, split = gradient(10_000), gradient(budget)
    torch.testing.assert_close(split[0], whole[0], atol=1e-5 * float(whole[0].abs().max()), rtol=1e-4)
    np.testing.assert_allclose(np.concatenate(split[1]), np.concatenate(whole[1]), atol=1e-5)


def test_each_token_has_the_value_of_the_state_before_it(tiny_model):
    critic = new_critic(tiny_model)
    group = lesson(3)
    critic.learn([group])
    (found,) = values(critic, group)
    for start, end in pairwise(group["tokens_offsets"]):
        ids = np.concatenate([group["prompt_tokens"], group["tokens"][start:end]])
        with torch.no_grad():
            logits = critic.backend._model(input_ids=torch.from_numpy(ids.astype("i8"))[None]).logits[0, :, 0]
        np.testing.assert_allclose(found[start:end], logits[len(group["prompt_tokens"]) - 1 : -1], atol=1e-5)


def test_tokens_that_do_not_count_teach_nothing(tiny_model):
    group = lesson(1)
    group["loss_mask"] = np.zeros_like(group["loss_mask"])
    metrics = new_critic(tiny_model).learn([group])
    assert (metrics["loss"], metrics["grad_norm"]) == (0.0, 0.0)


def test_several_optimizer_steps_make_one_version(tiny_model):
    critic = new_critic(tiny_model, updates=3)
    critic.learn([lesson(seed) for seed in range(4)])
    steps = {int(state["step"]) for state in critic.optimizer.adamw.state.values()}
    assert (critic.version, steps) == (1, {3})


def test_the_head_of_a_reward_model_is_kept(tiny_model, tmp_path):
    model = LlamaForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    critic = new_critic(tmp_path)
    assert torch.equal(critic.backend.parameters["score.weight"], model.score.weight)
    (found,) = values(critic, lesson(1))
    assert np.abs(found).max() > 0


def test_a_checkpoint_goes_on_bit_by_bit(tiny_model, tmp_path):
    lessons = [[lesson(10 * step + i) for i in range(3)] for step in range(4)]
    whole, first = new_critic(tiny_model), new_critic(tiny_model)
    for step in lessons:
        whole.learn(step)
    for step in lessons[:2]:
        first.learn(step)
    folder = Checkpoints(tmp_path, Checkpoint(keep_last=1)).save(first, lineage=0)
    second = new_critic(folder)
    restore(folder, second)
    assert second.version == 2
    for step in lessons[2:]:
        second.learn(step)
    for name, parameter in whole.backend.parameters.items():
        assert torch.equal(parameter, second.backend.parameters[name]), name


def test_a_loss_that_is_not_finite_is_told(tiny_model):
    group = lesson(1)
    group["returns"][0] = np.nan
    with pytest.raises(StrettoError, match=r"the critic's loss of version 1 is nan"):
        new_critic(tiny_model).learn([group])

"""What a step is made of, for algorithms that need more than rewards."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.learner.batch import step_batch
from shared.algorithms import PRESETS
from shared.algorithms.advantages import gae, grpo, on_last_token
from shared.group import FinishReason, RewardStatus

from ..conftest import make_config, make_group

COST = {"signals": [{"name": "c", "function": "exact_match"}]}


def full_group(seed: int, **changes):
    """A group with the columns of all stages."""
    group = make_group(seed, **changes)
    random = np.random.default_rng(100 + seed)
    n, tokens = group.n_samples, len(group.columns["tokens"])
    group.columns |= {
        "costs": random.random(n).astype("f4"),
        "cost_status": np.full(n, RewardStatus.OK, dtype="u1"),
        "ref_logprobs": (group.columns["behavior_logprobs"] + 0.1 * random.normal(size=tokens)).astype("f4"),
        "values": random.normal(size=tokens).astype("f4"),
        "cost_values": random.normal(size=tokens).astype("f4"),
    }
    return group


def config_of(preset: str, **changes):
    cost = {"cost": COST} if preset == "safe_rlhf" else {}
    return make_config(**(cost | changes))


def batch_of(algorithm, *groups, version: int = 0, state=None, **changes):
    config = config_of("safe_rlhf" if algorithm.uses_costs else "", **changes)
    return step_batch(list(groups), algorithm, config, version, algorithm.initial_state() if state is None else state)


def advantages(batch) -> list[np.ndarray]:
    return [np.concatenate(group.columns["advantages"]) for group in batch.groups]


def test_gae_is_whitened_over_the_step_and_the_critic_learns_the_returns_from_before():
    ppo = PRESETS["ppo"](kl_in="none")
    groups = [full_group(seed) for seed in (1, 2)]
    batch = batch_of(ppo, *groups)
    flat = np.concatenate(advantages(batch))
    assert flat.mean() == pytest.approx(0, abs=1e-12) and flat.std(ddof=1) == pytest.approx(1, abs=1e-6)
    for group, lesson in zip(groups, batch.lessons["critic"], strict=True):
        mask, lengths = group.columns["loss_mask"], np.diff(group.columns["tokens_offsets"])
        rewards = on_last_token(group.columns["rewards"], mask, lengths)
        _, returns = gae(rewards, group.columns["values"], mask, lengths, gamma=1.0, lam=0.95)
        np.testing.assert_allclose(lesson["returns"], returns, rtol=1e-5)
        np.testing.assert_array_equal(lesson["tokens"], group.columns["tokens"])
    values, returns = (np.concatenate([x[name] for x in batch.lessons["critic"]]) for name in ("values", "returns"))
    explained = 1 - (returns - values).var() / returns.var()
    assert batch.metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-5)


def test_the_kl_to_the_reference_lowers_the_score_of_a_sample():
    group = full_group(1)
    columns = group.columns
    batch = batch_of(PRESETS["grpo"](kl_in="reward", kl_coefficient=0.5), group)
    kl = columns["behavior_logprobs"].astype("f8") - columns["ref_logprobs"]
    scores = columns["rewards"] - 0.5 * np.add.reduceat(kl, columns["tokens_offsets"][:-1])
    np.testing.assert_allclose(
        advantages(batch)[0], np.repeat(grpo(scores), np.diff(columns["tokens_offsets"])), rtol=1e-6
    )


def test_a_sample_with_an_invalid_cost_is_neither_trained_nor_counted():
    group = full_group(1)
    group.columns["cost_status"][1] = RewardStatus.INVALID
    batch = batch_of(PRESETS["safe_rlhf"](kl_in="none"), group)
    assert batch.metrics["train/samples"] == 3
    kept = [0, 2, 3]
    assert batch.metrics["cost/mean"] == pytest.approx(group.columns["costs"][kept].mean())
    assert set(batch.lessons) == {"critic", "cost_critic"}


def test_the_multiplier_moves_before_the_step_by_the_costs_of_fresh_samples():
    old, new = full_group(1, versions=1), full_group(2, versions=5)
    batch = batch_of(PRESETS["safe_rlhf"](kl_in="none", cost_window=1), old, new, version=6, state={"multiplier": 2.0})
    expected = 2.0 * np.exp(0.1 * 2.0 * new.columns["costs"].mean())
    assert batch.state["multiplier"] == pytest.approx(expected, rel=1e-6)


def greedy_group(seed: int):
    """A group of five samples, the last one greedy."""
    group = make_group(seed, n=5)
    group.columns["greedy"] = np.arange(5) == 4
    return group


def test_the_greedy_answer_is_the_baseline_and_not_trained():
    group = greedy_group(1)
    batch = batch_of(PRESETS["remax"](kl_in="none"), group)
    rewards = group.columns["rewards"].astype("f8")
    lengths = np.diff(group.columns["tokens_offsets"])[:4]
    np.testing.assert_allclose(advantages(batch)[0], np.repeat(rewards[:4] - rewards[4], lengths))
    assert batch.metrics["train/samples"] == 4
    assert batch.metrics["reward/mean"] == pytest.approx(rewards[:4].mean())


def test_without_a_valid_reward_of_the_greedy_answer_a_group_teaches_nothing():
    group = greedy_group(1)
    group.columns["reward_status"][4] = RewardStatus.INVALID
    assert batch_of(PRESETS["remax"](kl_in="none"), group).groups == []


def test_truncated_samples_are_in_the_baseline_but_in_neither_numerator_nor_denominator():
    group = make_group(1)
    group.columns["finish_reasons"][:] = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP)
    lengths = np.diff(group.columns["tokens_offsets"])
    every, some = (batch_of(PRESETS["grpo"](truncated=how), group) for how in ("train", "exclude"))
    np.testing.assert_array_equal(advantages(every)[0], advantages(some)[0])
    assert every.metrics["train/tokens"] - some.metrics["train/tokens"] == lengths[1]
    assert not some.groups[0].mask[1].any()


def test_the_overlong_penalty_of_dapo_comes_before_the_baseline():
    group = make_group(3)
    lengths = np.diff(group.columns["tokens_offsets"])
    batch = batch_of(PRESETS["dapo"](overlong_buffer=8), group)  # of max_tokens 12
    scores = group.columns["rewards"] + np.clip((4 - lengths) / 8, -1, 0)
    np.testing.assert_allclose(advantages(batch)[0], np.repeat(grpo(scores), lengths))


def test_signals_are_normalized_over_the_step_before_their_weights():
    signals = [
        {"name": "a", "function": "exact_match", "weight": 2.0, "normalize": True},
        {"name": "b", "function": "exact_match", "weight": 0.5},
    ]
    random = np.random.default_rng(5)
    groups = [make_group(seed) for seed in (1, 2)]
    for group in groups:
        a, b = random.normal(3, 9, 4).astype("f4"), random.random(4).astype("f4")
        status = np.zeros(4, dtype="u1")
        group.columns |= {"signal/a": a, "signal/b": b, "signal_status/a": status, "signal_status/b": status}
        group.columns["rewards"] = 2 * a + 0.5 * b
    batch = batch_of(PRESETS["dr_grpo"](), *groups, reward={"signals": signals})
    every = np.concatenate([group.columns["signal/a"] for group in groups]).astype("f8")
    for group, found in zip(groups, advantages(batch), strict=True):
        rewards = 2 * (group.columns["signal/a"] - every.mean()) / every.std() + 0.5 * group.columns["signal/b"]
        lengths = np.diff(group.columns["tokens_offsets"])
        np.testing.assert_allclose(found, np.repeat(rewards - rewards.mean(), lengths), rtol=1e-5, atol=1e-6)


def test_a_group_without_advantages_stays_where_kl_or_entropy_teach():
    group = full_group(1, rewards=[1.0] * 4)
    assert batch_of(PRESETS["grpo"](), group).groups == []
    assert len(batch_of(PRESETS["grpo"](entropy_coefficient=0.1), group).groups) == 1
    assert len(batch_of(PRESETS["grpo"](kl_in="loss"), group).groups) == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_the_gradient_of_a_preset_is_the_same_however_a_step_is_split(preset, tiny_model, new_trainer):
    """To 1e-6 of the largest, which is what float32 holds."""
    groups = [greedy_group(seed) if preset == "remax" else full_group(seed) for seed in range(3)]
    for group in groups:
        group.columns.setdefault("ref_logprobs", group.columns["behavior_logprobs"] * np.float32(0.9))
    algorithm = PRESETS[preset](entropy_coefficient=0.01, kl_in="loss", correction="tis")

    def gradient(budget: int) -> torch.Tensor:
        learner = {"dtype": "float32", "lr": 1e-3, "tokens_per_micro_batch": budget}
        cost = {"cost": COST} if preset == "safe_rlhf" else {}
        trainer = new_trainer(algorithm, learner=learner, **cost)
        found = {}

        def keep() -> torch.Tensor:
            found["gradient"] = torch.cat([p.grad.reshape(-1).clone() for p in trainer.backend.parameters.values()])
            return torch.zeros(())

        trainer.optimizer.step = keep
        trainer.step(groups)
        return found["gradient"]

    whole = gradient(10_000)
    assert whole.abs().max() > 0
    for budget in (60, 1):
        torch.testing.assert_close(gradient(budget), whole, atol=1e-6 * float(whole.abs().max()), rtol=1e-5)


def test_several_optimizer_steps_make_one_version_of_parts_of_the_groups(new_trainer):
    learner = {"dtype": "float32", "lr": 1e-3, "updates": 2}
    trainer = new_trainer(PRESETS["grpo"](correction="decoupled"), learner=learner)
    groups = [make_group(seed) for seed in range(4)]
    batch = trainer.prepare(groups)
    assert [[g.group_id for g in part.groups] for part in batch.parts] == [["g0", "g2"], ["g1", "g3"]]
    assert sum(part.whole.tokens for part in batch.parts) == sum(len(g.columns["tokens"]) for g in groups)
    metrics = trainer.update(batch)
    assert trainer.version == 1 and trainer.optimizer.steps == 1
    assert {int(s["step"]) for s in trainer.optimizer.adamw.state.values()} == {2}
    assert metrics["ratio/mean"] > 0


def test_with_several_steps_decoupled_clips_around_the_policy_from_before_them(new_trainer):
    seen = []

    class Watching(PRESETS["grpo"]):
        def loss(self, batch):
            seen.append((batch.logprobs.detach() - batch.old_logprobs).abs().max().item())
            return super().loss(batch)

    learner = {"dtype": "float32", "lr": 1e-2, "updates": 2}
    groups = [make_group(seed) for seed in range(4)]
    new_trainer(Watching(correction="decoupled"), learner=learner).step(groups)
    first, second = seen
    assert first == pytest.approx(0, abs=1e-5) and second > 1e-2
    seen.clear()
    new_trainer(Watching(correction="tis"), learner=learner).step(groups)
    assert seen == [0.0, 0.0]

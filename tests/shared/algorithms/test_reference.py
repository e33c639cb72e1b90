"""Advantages, losses and KL estimators against reference numbers in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.algorithms import advantages
from shared.algorithms.losses import AGGREGATIONS, Denominators, aggregate, kl_k1, kl_k2, kl_k3, ppo_loss

REFERENCE = json.loads((Path(__file__).parents[2] / "vectors" / "rl_reference.json").read_text())
INPUTS, EXPECTED = REFERENCE["inputs"], REFERENCE["expected"]
MASK = torch.tensor(INPUTS["mask"], dtype=torch.bool)


def table(name: str) -> torch.Tensor:
    return torch.tensor(INPUTS[name], dtype=torch.float64)


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "estimator"),
    [
        ("grpo std", advantages.grpo),
        ("grpo no std (dr_grpo)", advantages.dr_grpo),
        ("rloo", advantages.rloo),
    ],
)
def test_group_advantages_are_those_of_the_reference(case, estimator):
    groups, scores = np.array(INPUTS["group"]), np.array(INPUTS["score"])
    rows = np.zeros(len(scores))
    for group in np.unique(groups):
        rows[groups == group] = estimator(scores[groups == group])
    expected = EXPECTED[case]
    expected = np.array(expected["advantages"] if isinstance(expected, dict) else expected)
    close(rows[:, None] * MASK.numpy(), expected * MASK.numpy())


PPO_CASES = {
    "ppo clip=0.2 dual=3 agg=token-mean": ("token_mean", 0.2),
    "ppo clip=0.2 dual=3 agg=seq-mean-token-sum": ("seq_mean_token_sum", 0.2),
    "ppo clip=0.2 dual=3 agg=seq-mean-token-mean": ("seq_mean_token_mean", 0.2),
    "ppo clip=0.2 dual=3 agg=seq-mean-token-sum-norm": ("seq_mean_token_sum_norm", 0.2),
    "dapo clip 0.2/0.28 token-mean": ("token_mean", 0.28),
}


@pytest.mark.parametrize("case", PPO_CASES)
def test_the_ppo_loss_and_its_gradient_are_those_of_the_reference(case):
    how, clip_high = PPO_CASES[case]
    logprobs = table("logprob").requires_grad_()
    old, advantage = table("old_logprob"), table("advantages")
    sample = torch.arange(len(MASK))[:, None].expand_as(MASK)[MASK]
    losses, _ = ppo_loss(logprobs[MASK], old[MASK], advantage[MASK], clip_low=0.2, clip_high=clip_high, dual_clip=3.0)
    whole = Denominators(tokens=int(MASK.sum()), samples=len(MASK), max_tokens=MASK.shape[1])
    loss = aggregate(losses, sample, len(MASK), how, whole)
    loss.backward()
    close(loss.item(), EXPECTED[case]["loss"])
    close(logprobs.grad, EXPECTED[case]["grad"])


@pytest.mark.parametrize(("case", "estimator"), [("kl k1", kl_k1), ("kl k2", kl_k2), ("kl k3", kl_k3)])
def test_kl_estimators_are_those_of_the_reference(case, estimator):
    values = estimator(table("logprob"), table("ref_logprob"))
    close(values[MASK], torch.tensor(EXPECTED[case]["per_token"], dtype=torch.float64)[MASK])


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(how):
    generator = torch.Generator().manual_seed(1)
    sample = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])
    whole = Denominators(tokens=10, samples=4, max_tokens=6)
    values = torch.randn(10, generator=generator, dtype=torch.float64)

    def gradient(parts: list[list[int]]) -> tuple[float, torch.Tensor]:
        x = values.clone().requires_grad_()
        total = 0.0
        for part in parts:
            rows = torch.isin(sample, torch.tensor(part))
            local = torch.searchsorted(torch.tensor(part), sample[rows])
            loss = aggregate(x[rows] ** 2, local, len(part), how, whole)
            loss.backward()
            total += loss.item()
        return total, x.grad

    one, several = gradient([[0, 1, 2, 3]]), gradient([[1], [0, 3], [2]])
    close(several[0], one[0])
    close(several[1], one[1])


@pytest.mark.parametrize("estimator", [advantages.grpo, advantages.dr_grpo, advantages.rloo])
def test_equal_rewards_give_exactly_zero(estimator):
    assert estimator(np.full(7, 0.1)).tolist() == [0.0] * 7


def test_golden_values_of_a_group():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    close(np.round(advantages.grpo(rewards), 4), [0.8660, -0.8660, -0.8660, 0.8660])
    close(advantages.rloo(rewards), [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    close(advantages.dr_grpo(rewards), [0.5, -0.5, -0.5, 0.5])

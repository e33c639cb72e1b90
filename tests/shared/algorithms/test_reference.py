"""Advantages, losses and KL estimators against reference numbers in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.algorithms import PRESETS, advantages
from shared.algorithms.base import LossInput, ScoredGroup
from shared.algorithms.losses import (
    AGGREGATIONS,
    Denominators,
    aggregate,
    kl_k1,
    kl_k2,
    kl_k3,
    sequence_mean,
    value_loss,
)

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


FLAT = MASK.numpy().reshape(-1)
LENGTHS = np.full(len(MASK), MASK.shape[1])
TOKEN_REWARDS = np.array(INPUTS["token_level_rewards"]).reshape(-1)
VALUES = np.array(INPUTS["values"]).reshape(-1)


def on_mask(values) -> np.ndarray:
    return np.asarray(values, dtype="f8").reshape(-1)[FLAT]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9)])
def test_gae_is_that_of_the_reference(gamma, lam):
    found, returns = advantages.gae(TOKEN_REWARDS, VALUES, FLAT, LENGTHS, gamma=gamma, lam=lam)
    expected = EXPECTED[f"gae gamma={gamma} lam={lam}"]
    close(on_mask(returns), on_mask(expected["returns"]))
    close(on_mask(advantages.whiten(found, FLAT)), on_mask(expected["advantages_whitened"]))


def test_rewards_to_go_are_those_of_the_reference():
    returns = advantages.reward_to_go(TOKEN_REWARDS, FLAT, LENGTHS)
    expected = EXPECTED["reinforce++ gamma=1"]
    close(on_mask(returns), on_mask(expected["returns"]))
    close(on_mask(advantages.whiten(returns, FLAT)), on_mask(expected["advantages_whitened"]))


def scored(rows: np.ndarray, **changes) -> ScoredGroup:
    """The rows of the tables as one group."""
    lengths = LENGTHS[rows]
    tokens = int(lengths.sum())
    unknown = np.full(tokens, np.nan)
    fields = {
        "rewards": np.array(INPUTS["score"])[rows],
        "lengths": lengths,
        "mask": MASK.numpy()[rows].reshape(-1),
        "max_tokens": MASK.shape[1],
        "state": {},
        "kl": np.zeros(tokens),
        "costs": np.full(len(rows), np.nan),
        "values": unknown,
        "cost_values": unknown,
        "greedy_reward": np.nan,
    }
    return ScoredGroup(**(fields | changes))


def test_remax_is_that_of_the_reference():
    for row in range(len(MASK)):
        group = scored(np.array([row]), greedy_reward=INPUTS["greedy_score"][row])
        found = PRESETS["remax"](clip_difference=None).advantages(group)
        close(found[group.mask], np.array(EXPECTED["remax"]["advantages"][row])[group.mask])


def test_the_kl_in_the_reward_is_that_of_the_reference():
    kl = 0.1 * kl_k1(table("old_logprob"), table("ref_logprob")).numpy().reshape(-1)
    found = scored(np.arange(len(MASK)), kl=kl * FLAT).token_rewards
    close(on_mask(found), on_mask(EXPECTED["kl in reward beta=0.1 (k1)"]["token_level_rewards"]))


LOSS_CASES = {
    "ppo clip=0.2 dual=3 agg=token-mean": PRESETS["grpo"](),
    "ppo clip=0.2 dual=3 agg=seq-mean-token-sum": PRESETS["grpo"](aggregation="seq_mean_token_sum"),
    "ppo clip=0.2 dual=3 agg=seq-mean-token-mean": PRESETS["grpo"](aggregation="seq_mean_token_mean"),
    "ppo clip=0.2 dual=3 agg=seq-mean-token-sum-norm": PRESETS["dr_grpo"](),
    "dapo clip 0.2/0.28 token-mean": PRESETS["dapo"](),
    "gspo clip 3e-4/4e-4 seq-mean-token-mean": PRESETS["gspo"](),
    "cispo clip 0.2/0.28 token-mean": PRESETS["cispo"](clip_low=0.2, clip_high=0.28),
}


def loss_input(logprobs, old_logprobs, advantage, **changes) -> LossInput:
    """The tokens that count of [B, T] tables."""
    fields = {
        "logprobs": logprobs[MASK],
        "entropy": torch.zeros(int(MASK.sum()), dtype=torch.float64),
        "old_logprobs": old_logprobs[MASK],
        "behavior_logprobs": old_logprobs[MASK],
        "ref_logprobs": None,
        "advantages": advantage[MASK],
        "sample": torch.arange(len(MASK))[:, None].expand_as(MASK)[MASK],
        "n_samples": len(MASK),
        "state": {},
    }
    return LossInput(**(fields | changes))


WHOLE = Denominators(tokens=int(MASK.sum()), samples=len(MASK), max_tokens=MASK.shape[1])


@pytest.mark.parametrize("case", LOSS_CASES)
def test_the_policy_loss_and_its_gradient_are_those_of_the_reference(case):
    logprobs = table("logprob").requires_grad_()
    batch = loss_input(logprobs, table("old_logprob"), table("advantages"))
    losses, _ = LOSS_CASES[case].objective(batch)
    loss = aggregate(losses, batch.sample, batch.n_samples, LOSS_CASES[case].aggregation, WHOLE)
    loss.backward()
    close(loss.item(), EXPECTED[case]["loss"])
    close(logprobs.grad, EXPECTED[case]["grad"])


def test_the_value_loss_and_its_gradient_are_those_of_the_reference():
    expected = EXPECTED["value loss clip=0.2 returns=reward-to-go"]
    returns = torch.tensor(EXPECTED["reinforce++ gamma=1"]["returns"], dtype=torch.float64)
    values = table("vpreds").requires_grad_()
    losses, clipped = value_loss(values[MASK], table("values")[MASK], returns[MASK], 0.2)
    loss = losses.sum() / WHOLE.tokens
    loss.backward()
    close(loss.item(), expected["loss"])
    close(values.grad, expected["grad"])
    close(clipped.double().mean().item(), expected["clipfrac"])


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


def test_golden_values_of_gae():
    rewards, values, lengths = np.array([0.0, 0, 1]), np.full(3, 0.5), np.array([3])
    found, returns = advantages.gae(rewards, values, np.ones(3, dtype=bool), lengths, gamma=1.0, lam=0.95)
    close(found, [0.45125, 0.475, 0.5])
    close(returns, [0.95125, 0.975, 1.0])


def test_gae_skips_the_tokens_of_a_tool():
    rewards, values, mask = np.array([0.0, 0, 1]), np.full(3, 0.5), np.array([True, False, True])
    found, _ = advantages.gae(rewards, values, mask, np.array([3]), gamma=1.0, lam=0.95)
    close(found[mask], [0.475, 0.5])


def test_samples_do_not_reach_into_each_other():
    mask, lengths = np.ones(5, dtype=bool), np.array([2, 0, 3])
    together = advantages.gae(np.arange(5.0), np.ones(5), mask, lengths, gamma=0.9, lam=0.8)
    alone = [
        advantages.gae(np.arange(5.0)[s], np.ones(n), mask[s], np.array([n]), gamma=0.9, lam=0.8)
        for s, n in ((slice(0, 2), 2), (slice(2, 5), 3))
    ]
    for whole, parts in zip(together, zip(*alone, strict=True), strict=True):
        close(whole, np.concatenate(parts))


def test_golden_values_of_the_overlong_penalty():
    lengths = np.array([16384, 18432, 20480, 30000])
    assert advantages.overlong(lengths, 20480, 4096).tolist() == [0.0, -0.5, -1.0, -1.0]


def test_golden_values_of_safe_rlhf():
    safe = PRESETS["safe_rlhf"](multiplier_lr=0.1, threshold=0.0, cost_window=0)
    fresh, stale = np.array([1.0, 3.0]), np.array([100.0])
    samples = {"costs": np.concatenate([fresh, stale]), "lags": np.array([0, 0, 1]), "rewards": np.zeros(3)}
    state = safe.before_step(safe.initial_state(), samples)
    assert state["multiplier"] == pytest.approx(1.2214, abs=5e-5)
    assert (
        safe.model_copy(update={"multiplier_max": 1.1}).before_step({"multiplier": 1.0}, samples)["multiplier"] == 1.1
    )
    one = {"lengths": np.array([1]), "mask": np.array([True]), "kl": np.zeros(1), "state": state}
    group = scored(
        np.array([0]),
        **one,
        rewards=np.array([1.0]),
        costs=np.array([0.5]),
        values=np.zeros(1),
        cost_values=np.zeros(1),
    )
    found = safe.advantages(group)
    assert found["advantages"][0] == pytest.approx(0.17525, abs=1e-5)
    assert (found["returns"][0], found["cost_returns"][0]) == (1.0, 0.5)


def test_a_multiplier_that_runs_away_stays_finite_and_comes_back():
    safe = PRESETS["safe_rlhf"](multiplier_lr=2.0, threshold=0.15)
    state = {"multiplier": 8.76}
    found = []
    for cost in (0.3, 0.3, 0.3, 0.05, 0.3):
        state = safe.before_step(state, {"costs": np.array([cost]), "lags": np.zeros(1), "rewards": np.zeros(1)})
        found.append(state["multiplier"])
    assert found == pytest.approx([121.3, np.exp(20.0), np.exp(20.0), np.exp(-20.0), np.exp(-20.0)], rel=1e-3)


def test_the_kl_weighs_alike_whatever_the_multiplier():
    safe = PRESETS["safe_rlhf"](lam=1.0)
    one = {"lengths": np.array([1]), "mask": np.array([True]), "values": np.zeros(1), "cost_values": np.zeros(1)}
    for multiplier in (0.1, 1.0, 7.0):
        group = scored(
            np.array([0]),
            **one,
            kl=np.array([0.3]),
            rewards=np.zeros(1),
            costs=np.zeros(1),
            state={"multiplier": multiplier},
        )
        assert safe.advantages(group)["advantages"][0] == pytest.approx(-0.3)


def test_the_kl_of_remax_is_of_a_token_or_of_all_later_ones():
    group = scored(
        np.array([0]),
        lengths=np.array([3]),
        mask=np.ones(3, dtype=bool),
        kl=np.array([0.1, 0.2, 0.3]),
        rewards=np.array([9.0]),
        greedy_reward=1.0,
    )
    close(PRESETS["remax"]().advantages(group), [4.9, 4.8, 4.7])
    close(PRESETS["remax"](kl_cumulative=True, clip_difference=None).advantages(group), [7.4, 7.5, 7.7])


def corrected(**settings) -> tuple[torch.Tensor, dict]:
    """Losses of four tokens of two samples with ratios exp(o − b) of 4, 1, ½, ½, by the plain loss −A · exp(n − o)."""
    behavior = torch.zeros(4, dtype=torch.float64)
    old = torch.log(torch.tensor([4.0, 1.0, 0.5, 0.5], dtype=torch.float64))
    batch = LossInput(
        logprobs=old.clone().requires_grad_(),
        entropy=torch.zeros(4),
        old_logprobs=old,
        behavior_logprobs=behavior,
        ref_logprobs=None,
        advantages=torch.full((4,), -1.0, dtype=torch.float64),
        sample=torch.tensor([0, 0, 1, 1]),
        n_samples=2,
        state={},
    )
    losses, measures = PRESETS["grpo"](**settings).objective(batch)
    return losses.detach(), measures


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"correction": "tis"}, [2, 1, 0.5, 0.5]),
        ({"correction": "decoupled", "correction_cap": 3}, [3, 1, 0.5, 0.5]),
        ({"correction": "tis", "correction_level": "sequence", "correction_cap": 1.5}, [1.5, 1.5, 0.5, 0.5]),
        ({"correction": "tis", "correction_level": "sequence", "correction_cap": 9}, [2, 2, 0.5, 0.5]),
        ({"correction": "mask", "correction_band": (0.9, 3)}, [0, 1, 0, 0]),
        ({"correction": "mask", "correction_band": (0.9, 3), "correction_level": "sequence"}, [1, 1, 0, 0]),
    ],
)
def test_corrections_weigh_or_drop_tokens_or_samples(settings, expected):
    close(corrected(**settings)[0], expected)


def test_what_a_correction_cuts_is_measured():
    _, measures = corrected(correction="tis")
    assert measures["correction/cut"].tolist() == [True, False, False, False]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_and_entropy_in_the_loss(estimator):
    logprobs, reference = table("logprob").requires_grad_(), table("ref_logprob")
    entropy = torch.linspace(0, 1, int(MASK.sum()), dtype=torch.float64)
    algorithm = PRESETS["grpo"](kl_in="loss", kl_estimator=estimator, entropy_coefficient=0.01)
    batch = loss_input(
        logprobs,
        table("old_logprob"),
        torch.zeros_like(logprobs),
        ref_logprobs=reference[MASK],
        entropy=entropy,
        state={"kl_coefficient": 0.5},
    )
    losses, measures = algorithm.objective(batch)
    kl = torch.tensor(EXPECTED[f"kl {estimator}"]["per_token"], dtype=torch.float64)[MASK]
    close(losses.detach(), 0.5 * kl - 0.01 * entropy)
    close(measures["kl/reference"], kl)


def test_the_kl_coefficient_moves_towards_its_target():
    algorithm = PRESETS["ppo"](kl_coefficient=0.1, kl_target=0.02, kl_horizon=1000)
    state = algorithm.initial_state()
    far = algorithm.after_step(state, {"kl/reference": 0.2, "train/samples": 64.0})
    assert far["kl_coefficient"] == pytest.approx(0.1 * (1 + 0.2 * 64 / 1000))
    near = algorithm.after_step(state, {"kl/reference": 0.019, "train/samples": 64.0})
    assert near["kl_coefficient"] == pytest.approx(0.1 * (1 - 0.05 * 64 / 1000))
    assert algorithm.after_step(state, {"train/samples": 64.0}) == state


def test_a_sequence_mean_is_that_of_its_sample():
    values = torch.tensor([1.0, 3.0, 5.0])
    assert sequence_mean(values, torch.tensor([0, 0, 2]), 3).tolist() == [2.0, 2.0, 5.0]

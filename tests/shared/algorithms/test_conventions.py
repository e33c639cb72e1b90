"""The conventions of docs/algorithms.md in which implementations differ, each by its number there."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shared.algorithms import PRESETS, advantages
from shared.algorithms.losses import Denominators, aggregate, kl_k1, kl_k3, log_ratio, value_loss

from .test_reference import corrected, loss_input, scored, table


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def cispo(ratio: float, **settings) -> float:
    """The weight that CISPO gives a token of advantage −1."""
    logprobs = torch.zeros((8, 7), dtype=torch.float64) + math.log(ratio)
    batch = loss_input(logprobs, torch.zeros_like(logprobs), -torch.ones_like(logprobs))
    losses, _ = PRESETS["cispo"](**settings).loss(batch)
    return float(losses[0] / logprobs[0, 0])


def test_1_the_value_loss_has_a_factor_of_a_half():
    assert value_loss(tensor(3.0), tensor(3.0), tensor(1.0), 0.2)[0].item() == 2.0


@pytest.mark.parametrize(("dual_clip", "expected"), [(3.0, 3.0), (None, 10.0)])
def test_2_the_dual_clip_is_on_with_3_and_can_be_off(dual_clip, expected):
    logprobs = torch.zeros((8, 7), dtype=torch.float64) + math.log(10.0)
    batch = loss_input(logprobs, torch.zeros_like(logprobs), -torch.ones_like(logprobs))
    assert PRESETS["grpo"]().dual_clip == 3.0
    assert PRESETS["grpo"](dual_clip=dual_clip).loss(batch)[0][0].item() == pytest.approx(expected)


def test_3_the_std_of_a_group_is_unbiased_with_an_epsilon_of_1e_6():
    rewards = np.array([2e-6, 0.0])
    np.testing.assert_allclose(advantages.grpo(rewards), np.array([1, -1]) * 1e-6 / (math.sqrt(2) * 1e-6 + 1e-6))


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo", "cispo"])
def test_4_a_single_sample_that_is_left_of_a_group_has_no_advantage(preset):
    group = scored(np.array([0]), rewards=np.array([5.0]))
    assert np.all(PRESETS[preset]().advantages(group) == 0)


def test_5_the_norm_of_seq_mean_token_sum_norm_is_a_constant_of_the_run():
    whole = Denominators(tokens=3, samples=2, max_tokens=100)
    loss = aggregate(tensor(1, 2, 3), torch.tensor([0, 0, 1]), 2, "seq_mean_token_sum_norm", whole)
    assert loss.item() == pytest.approx(6 / (2 * 100))


def test_6_the_bounds_of_cispo_are_relative_to_1_and_there_is_none_below():
    assert cispo(9.0, clip_high=4.0) == pytest.approx(5.0)
    assert cispo(1e-3) == pytest.approx(1e-3)


def test_7_the_log_ratio_is_clamped_to_20():
    assert log_ratio(tensor(100.0, -100.0), tensor(0.0, 0.0)).tolist() == [20.0, -20.0]


def test_8_the_value_of_the_kl_is_not_clamped():
    assert kl_k1(tensor(35.0), tensor(0.0)).item() == 35.0
    assert kl_k3(tensor(35.0), tensor(0.0)).item() == pytest.approx(34.0 + math.exp(-20), rel=1e-12)
    assert kl_k3(tensor(0.0), tensor(12.0)).item() == pytest.approx(math.exp(12) - 13)


def test_9_the_kl_in_the_reward_is_cumulative_where_rewards_are_and_summed_for_a_group():
    one = {"lengths": np.array([3]), "mask": np.ones(3, dtype=bool), "kl": np.array([0.1, 0.2, 0.3])}
    group = scored(np.array([0]), rewards=np.array([1.0]), **one)
    np.testing.assert_allclose(PRESETS["reinforce_pp"]().advantages(group), [0.4, 0.5, 0.7])
    np.testing.assert_allclose(group.scores, [0.4])


def test_10_the_last_token_is_the_last_that_counts():
    mask = np.array([True, True, False, False, True, False])
    assert advantages.on_last_token(np.array([5.0, 7.0]), mask, np.array([3, 3])).tolist() == [0, 5, 0, 0, 7, 0]
    assert not advantages.on_last_token(np.array([5.0]), np.zeros(3, dtype=bool), np.array([3])).any()


def test_11_remax_clips_the_difference_and_nothing_else_clips_rewards():
    group = scored(
        np.array([0]),
        lengths=np.array([1]),
        mask=np.array([True]),
        kl=np.zeros(1),
        greedy_reward=-3.0,
        rewards=np.array([90.0]),
    )
    assert PRESETS["remax"]().advantages(group).tolist() == [5.0]
    assert PRESETS["remax"](clip_difference=None).advantages(group).tolist() == [93.0]
    assert PRESETS["reinforce_pp"]().advantages(group).tolist() == [90.0]


def test_12_returns_are_from_before_the_advantages_are_whitened():
    group = scored(np.arange(8), values=np.zeros(56))
    found = PRESETS["ppo"]().advantages(group)
    np.testing.assert_allclose(
        found["advantages"], found["returns"]
    )  # with values of 0; whitened later, by the learner


def test_13_gae_skips_tokens_that_do_not_count():
    mask, values = np.array([True, False, True]), np.array([0.5, 9.0, 0.5])
    found, returns = advantages.gae(np.array([0.0, 0, 1]), values, mask, np.array([3]), gamma=1.0, lam=0.95)
    np.testing.assert_allclose((found[1], returns[1]), 0)
    np.testing.assert_allclose(found[mask], [0.475, 0.5])


def test_14_after_the_last_token_the_value_is_0():
    found, _ = advantages.gae(np.zeros(1), np.array([2.0]), np.ones(1, dtype=bool), np.array([1]), gamma=1.0, lam=0.95)
    assert found.tolist() == [-2.0]


def test_15_tokens_that_a_correction_drops_stay_in_the_denominator():
    losses, _ = corrected(correction="mask", correction_band=(0.9, 3))
    whole = Denominators(tokens=4, samples=2, max_tokens=9)
    assert aggregate(losses, torch.tensor([0, 0, 1, 1]), 2, "token_mean", whole).item() == pytest.approx(1 / 4)
    assert aggregate(losses, torch.tensor([0, 0, 1, 1]), 2, "seq_mean_token_mean", whole).item() == pytest.approx(1 / 4)


def test_the_tables_of_these_tests_have_the_shape_they_assume():
    assert table("logprob").shape == (8, 7)

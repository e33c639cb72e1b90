"""One update: what is trained on, with which denominators, and what is reported."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.learner import trainer as trainer_module
from services.learner.batch import step_batch
from shared.algorithms.grpo import GRPO
from shared.algorithms.losses import AGGREGATIONS
from shared.errors import DriftError, SelfCheckError, StrettoError
from shared.group import RewardStatus

from ..conftest import gradient_of_step, make_config, make_group


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_the_same_however_a_step_is_split(new_trainer, aggregation):
    groups = [make_group(seed) for seed in range(3)]
    algorithm = GRPO(aggregation=aggregation)
    learner = {"dtype": "float32", "lr": 1e-3}
    whole = gradient_of_step(new_trainer(algorithm, learner=learner | {"tokens_per_micro_batch": 10_000}), groups)
    for budget in (60, 25, 1):
        split = gradient_of_step(new_trainer(algorithm, learner=learner | {"tokens_per_micro_batch": budget}), groups)
        torch.testing.assert_close(split, whole, atol=1e-6 * float(whole.abs().max()) * 10, rtol=1e-4)


def test_a_group_of_equal_rewards_adds_nothing_but_counts_in_the_denominator():
    equal = make_group(5, rewards=[0.3] * 4)
    batch = step_batch([make_group(1), equal], GRPO(), make_config(), 0, {})
    assert [group.group_id for group in batch.groups] == ["g1"]
    assert batch.parts[0].whole.tokens == sum(len(make_group(seed).columns["tokens"]) for seed in (1, 5))
    assert batch.parts[0].whole.samples == 8


def test_leaving_out_a_group_of_equal_rewards_changes_no_gradient(new_trainer, monkeypatch):
    groups = [make_group(1), make_group(5, rewards=[0.3] * 4)]
    left_out = gradient_of_step(new_trainer(), groups)

    def keep_all(groups, *args):
        batch = step_batch(groups, *args)
        alone = step_batch([make_group(5)], *args).groups[0]
        zeros = [np.zeros(len(tokens)) for tokens in alone.tokens]
        kept = replace(alone, columns=alone.columns | {"advantages": zeros})
        (part,) = batch.parts
        return replace(batch, parts=[replace(part, groups=[*part.groups, kept])])

    monkeypatch.setattr(trainer_module, "step_batch", keep_all)
    kept_in = gradient_of_step(new_trainer(), groups)
    torch.testing.assert_close(kept_in, left_out, atol=1e-6 * float(left_out.abs().max()), rtol=1e-5)


def test_a_sample_without_a_valid_reward_leaves_baseline_and_loss():
    group = make_group(1, rewards=[0.0, 1.0, 9.0, 1.0])
    group.columns["reward_status"][2] = RewardStatus.INVALID
    batch = step_batch([group], GRPO(), make_config(), 0, {})
    assert len(batch.groups[0].tokens) == 3
    advantages = [part[0] for part in batch.groups[0].columns["advantages"]]
    np.testing.assert_allclose(sum(advantages), 0, atol=1e-12)
    assert batch.parts[0].whole.samples == 3
    assert batch.metrics["reward/invalid"] == 0.25
    assert batch.metrics["reward/equal_groups"] == 0
    assert batch.metrics["advantage/abs_mean"] == pytest.approx(
        np.abs(np.concatenate(batch.groups[0].columns["advantages"])).mean()
    )
    assert batch.metrics["reward/mean"] == pytest.approx(2 / 3)


def test_staleness_is_weighted_by_tokens():
    old, new = make_group(1, versions=3), make_group(2, versions=5)
    metrics = step_batch([old, new], GRPO(), make_config(), 5, {}).metrics
    counts = [len(g.columns["tokens"]) for g in (old, new)]
    assert metrics["staleness/mean"] == pytest.approx(2 * counts[0] / sum(counts))
    assert metrics["staleness/max"] == 2


def test_a_step_moves_version_and_weights(new_trainer):
    trainer = new_trainer()
    before = {name: p.detach().clone() for name, p in trainer.backend.parameters.items()}
    metrics = trainer.step([make_group(seed) for seed in range(3)])
    assert trainer.version == 1
    assert metrics["grad_norm"] > 0
    assert any(not torch.equal(before[name], p) for name, p in trainer.backend.parameters.items())


def test_a_step_tells_how_many_tokens_it_computed_and_how_much_was_padding(new_trainer):
    groups = [make_group(seed) for seed in range(3)]
    lengths = [len(g.columns["prompt_tokens"]) + len(g.columns["tokens"]) - 4 for g in groups]
    metrics = new_trainer().step(groups)
    assert metrics["perf/tokens_per_second"] * metrics["time/step_s"] == pytest.approx(sum(lengths))
    assert metrics["perf/padding"] == pytest.approx(1 - sum(lengths) / (3 * max(lengths)))
    nothing = new_trainer().step([make_group(1, rewards=[1.0] * 4)])
    assert (nothing["perf/tokens_per_second"], nothing["perf/padding"]) == (0, 0)


def test_a_step_without_any_advantage_moves_the_version_and_nothing_else(new_trainer):
    trainer = new_trainer()
    before = {name: p.detach().clone() for name, p in trainer.backend.parameters.items()}
    metrics = trainer.step([make_group(seed, rewards=[1.0] * 4) for seed in range(3)])
    assert (trainer.version, trainer.optimizer.steps, metrics["loss"]) == (1, 1, 0.0)
    assert all(torch.equal(before[name], p) for name, p in trainer.backend.parameters.items())


def test_a_token_without_a_log_prob_counts_as_ratio_one(new_trainer):
    group = make_group(1)
    group.columns["behavior_logprobs"][0] = np.nan
    metrics = new_trainer().step([group])
    assert metrics["drift/missing"] == 1
    assert np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])


SHIFTS = (0.5, -0.25, 1.0, 2.0)
"""What the engine's log-probs of the four samples of a group are above the learner's."""


def with_versions(group, *runs: list[tuple[int, int]]):
    """The group with these runs of (version, tokens), one list a sample; 0 tokens: all that are left."""
    parts = [
        [(version, n or len(tokens) - sum(n for _, n in own)) for version, n in own]
        for own, tokens in zip(runs, group.samples("tokens"), strict=True)
    ]
    group.columns["versions"] = np.array([run for own in parts for run in own], dtype="i4")
    group.columns["versions_offsets"] = np.cumsum([0, *map(len, parts)])
    return group


def drifted(trainer):
    """A group whose samples are of versions 3, 2 then 3, 3 and 1, its log-probs off by SHIFTS; and their lengths."""
    group = with_own_logprobs(trainer, make_group(6))
    lengths = [len(tokens) for tokens in group.samples("tokens")]
    group.columns["behavior_logprobs"] += np.repeat(SHIFTS, lengths).astype("f4")
    return with_versions(group, [(3, 0)], [(2, 1), (3, 0)], [(3, 0)], [(1, 0)]), lengths


def k3(shift: float) -> float:
    """Of KL(engine ‖ learner) where the engine's log-prob is `shift` above the learner's."""
    return math.exp(-shift) + shift - 1


@pytest.mark.parametrize("budget", [10_000, 1])
def test_the_drift_of_samples_of_the_own_version_is_apart_from_that_of_all(new_trainer, budget):
    trainer = new_trainer(learner={"dtype": "float32", "lr": 1e-3, "tokens_per_micro_batch": budget})
    trainer.version = 3
    group, n = drifted(trainer)
    assert n[1] > 1  # of the second sample only the first token is older
    metrics = trainer.step([group])
    fresh = {name.removeprefix("drift/fresh/"): v for name, v in metrics.items() if name.startswith("drift/fresh/")}
    assert fresh == pytest.approx(
        {
            "tokens": n[0] + n[2],
            "lag": 0,
            "mean": (0.5 * n[0] + 1.0 * n[2]) / (n[0] + n[2]),
            "max": 1.0,
            "k3": (k3(0.5) * n[0] + k3(1.0) * n[2]) / (n[0] + n[2]),
        },
        abs=1e-5,
    )
    assert metrics["drift/mean"] == pytest.approx(np.average(np.abs(SHIFTS), weights=n), abs=1e-5)
    assert metrics["drift/max"] == pytest.approx(2.0, abs=1e-5)
    assert metrics["kl"] == pytest.approx(np.average([k3(shift) for shift in SHIFTS], weights=n), abs=1e-5)


def test_without_samples_of_the_own_version_the_freshest_are_compared_and_nothing_ends(new_trainer):
    trainer = new_trainer(learner={"dtype": "float32", "drift_stop": 0.1})
    trainer.version = 5
    group, n = drifted(trainer)
    metrics = trainer.step([group])
    assert (metrics["drift/fresh/lag"], metrics["drift/fresh/tokens"]) == (2, n[0] + n[2])
    assert trainer.version == 6


def test_tokens_that_do_not_count_or_have_no_log_prob_are_not_compared(new_trainer):
    trainer = new_trainer()
    trainer.version = 3
    group, n = drifted(trainer)
    group.columns["behavior_logprobs"][0] = np.nan
    group.columns["loss_mask"][n[0] + n[1]] = False
    metrics = trainer.step([group])
    assert metrics["drift/fresh/tokens"] == n[0] - 1 + n[2] - 1
    mean = (0.5 * (n[0] - 1) + 1.0 * (n[2] - 1)) / (n[0] - 1 + n[2] - 1)
    assert metrics["drift/fresh/mean"] == pytest.approx(mean, abs=1e-5)


def test_a_step_without_anything_to_compare_has_no_drift_and_does_not_end(new_trainer):
    trainer = new_trainer(learner={"dtype": "float32", "drift_stop": 1e-9})
    metrics = trainer.step([make_group(1, rewards=[1.0] * 4)])
    assert not [name for name in metrics if name.startswith("drift/fresh")]


def test_drift_beyond_its_limit_ends_the_update_before_it_touches_the_weights(new_trainer):
    trainer = new_trainer(learner={"dtype": "float32", "lr": 1e-3, "drift_stop": 0.4})
    trainer.version = 3
    before = {name: p.detach().clone() for name, p in trainer.backend.parameters.items()}
    with pytest.raises(DriftError, match=r"sampled with version 3 .* above learner\.drift_stop \(0\.4\)"):
        trainer.step([drifted(trainer)[0]])
    assert (trainer.version, trainer.optimizer.steps) == (3, 0)
    assert all(torch.equal(before[name], p) for name, p in trainer.backend.parameters.items())


def test_a_loss_that_is_not_finite_names_its_groups(new_trainer):
    trainer = new_trainer()
    with torch.no_grad():
        next(iter(trainer.backend.parameters.values())).fill_(float("nan"))
    trainer.backend.use_snapshot(None)
    with pytest.raises(StrettoError, match=r"the loss of version 1 is nan .*groups g1"):
        trainer.step([make_group(1)])


def with_own_logprobs(trainer, group, shift: float = 0.0):
    """The group with the log-probs that the trainer's own policy gives its tokens."""
    from services.compute.packing import GroupBatch, micro_batches, pack

    tokens, mask = group.samples("tokens"), group.samples("loss_mask")
    n = len(tokens)
    batch = GroupBatch("g", group.columns["prompt_tokens"], tokens, mask, {}, np.zeros(n, dtype="i8"))
    (rows,) = micro_batches([batch], 10_000)
    with torch.no_grad():
        own, _ = trainer.backend.logprobs(pack(rows), 1.0)
    group.columns["behavior_logprobs"] = own.numpy() + np.float32(shift)
    return group


def test_the_self_check_passes_where_engine_and_learner_agree(new_trainer):
    trainer = new_trainer()
    found = trainer.self_check([with_own_logprobs(trainer, make_group(1))])
    assert found["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert found["clip_fraction"] == 0
    assert trainer.version == 0


def test_the_self_check_names_the_difference_where_they_do_not(new_trainer):
    trainer = new_trainer()
    with pytest.raises(
        SelfCheckError, match=r"differ by 0\.3 on average .allowed: 0\.001.*Likely causes: another temp"
    ):
        trainer.self_check([with_own_logprobs(trainer, make_group(1), shift=0.3)])


def test_the_self_check_passes_over_groups_without_a_token_that_counts(new_trainer):
    empty = make_group(2)
    empty.columns["loss_mask"][:] = False
    trainer = new_trainer()
    assert trainer.self_check([empty]) == {}
    with pytest.raises(SelfCheckError):
        trainer.self_check([empty, with_own_logprobs(trainer, make_group(1), shift=0.3)])


def test_the_self_check_refuses_a_learner_that_computes_nan(new_trainer):
    trainer = new_trainer()
    with torch.no_grad():
        next(iter(trainer.backend.parameters.values())).fill_(float("nan"))
    trainer.backend.use_snapshot(None)
    with pytest.raises(SelfCheckError, match="differ by nan"):
        trainer.self_check([make_group(1)])

"""The learning rate over a run, and clipped steps."""

from __future__ import annotations

import pytest
import torch

from services.compute.optimizer import Optimizer, schedule

from ..conftest import make_config


def learner(**settings):
    return make_config(learner={"lr": 0.1} | settings).learner


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_the_rate_warms_up_and_then_follows_its_schedule_down_to_zero(name, expected):
    settings = learner(schedule=name, warmup_steps=2)
    assert [schedule(settings, step, 6) for step in range(7)] == pytest.approx(expected, abs=1e-6)


def test_the_rate_stays_at_zero_past_the_end():
    assert [schedule(learner(schedule=name), 15, 10) for name in ("linear", "cosine")] == pytest.approx([0, 0])


def stepped(clip_norm: float | None) -> tuple[float, torch.Tensor]:
    """Norm and AdamW's first moment after a step with the gradient (3, 4)."""
    weight = torch.zeros(2, requires_grad=True)
    optimizer = Optimizer({"w": weight}, learner(clip_norm=clip_norm, betas=[0.0, 0.9]), 10)
    weight.grad = torch.tensor([3.0, 4.0])
    norm = float(optimizer.step())
    assert weight.grad is None
    return norm, optimizer.adamw.state[weight]["exp_avg"]


@pytest.mark.parametrize(("clip_norm", "used"), [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0]), (None, [3.0, 4.0])])
def test_a_gradient_is_clipped_to_its_norm_and_the_norm_before_is_reported(clip_norm, used):
    norm, moment = stepped(clip_norm)
    assert norm == pytest.approx(5)
    torch.testing.assert_close(moment, torch.tensor(used), atol=1e-5, rtol=1e-5)

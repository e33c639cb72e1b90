"""Log-probs, entropies and gradients against what autograd makes of log_softmax."""

from __future__ import annotations

import pytest
import torch

from services.compute.logprobs import token_logprobs


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_entropies_and_gradients_are_those_of_log_softmax(temperature, with_entropy):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(7, 50, generator=generator) * 5).requires_grad_()
    target = torch.randint(0, 50, (7,), generator=generator)
    weights = torch.randn(7, generator=generator)
    bonus = torch.randn(7, generator=generator) * with_entropy

    logprobs, entropy = token_logprobs(logits, target, temperature)
    (logprobs * weights + (entropy * bonus if with_entropy else 0.0)).sum().backward()
    gradient, logits.grad = logits.grad, None

    expected = torch.log_softmax(logits / temperature, -1)
    chosen = expected.gather(-1, target[:, None])[:, 0]
    own_entropy = -(expected.exp() * expected).sum(-1)
    (chosen * weights + own_entropy * bonus).sum().backward()
    torch.testing.assert_close(logprobs, chosen)
    torch.testing.assert_close(entropy, own_entropy)
    torch.testing.assert_close(gradient, logits.grad, atol=1e-6, rtol=1e-5)


def test_logits_far_from_zero_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([0]), 1.0)
    logprobs.sum().backward()
    assert logprobs.item() == 0 and entropy.item() == 0
    assert torch.isfinite(logits.grad).all()

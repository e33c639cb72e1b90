"""The sampler against the definition of what it draws from, written out in numpy float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.rollout.embedded.sampler import draw
from shared.config import Sampling
from shared.errors import WeightsError

V = 260


def distribution(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    scaled = logits.astype("f8") / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


@pytest.fixture
def logits() -> torch.Tensor:
    return 3 * torch.randn(5, V, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kept", [{}, {"top_k": 7}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.8}])
def test_a_token_is_where_the_distribution_reaches_its_uniform(logits: torch.Tensor, kept: dict[str, float]) -> None:
    uniforms = [0.02, 0.3, 0.5, 0.77, 0.999]
    sampling = Sampling(temperature=0.7, **kept)
    tokens, logprobs = draw(logits, uniforms, [sampling] * 5)
    for row in range(5):
        p = distribution(logits[row].numpy(), 0.7, **kept)
        assert tokens[row] == np.searchsorted(np.cumsum(p), uniforms[row])
        assert logprobs[row] == pytest.approx(np.log(p[tokens[row]]), abs=1e-5)


def test_rows_with_different_settings_do_not_touch_each_other(logits: torch.Tensor) -> None:
    settings = [
        Sampling(),
        Sampling(temperature=0),
        Sampling(top_k=3),
        Sampling(temperature=1.5, top_p=0.5),
        Sampling(temperature=0.2),
    ]
    uniforms = [0.1, 0.2, 0.9, 0.6, 0.4]
    tokens, logprobs = draw(logits, uniforms, settings)
    for row in range(5):
        alone = draw(logits[row : row + 1], uniforms[row : row + 1], settings[row : row + 1])
        assert (tokens[row], logprobs[row]) == (alone[0][0], pytest.approx(alone[1][0], abs=1e-6))


def test_greedy_takes_the_most_likely_token_with_its_plain_log_prob(logits: torch.Tensor) -> None:
    tokens, logprobs = draw(logits, [0.5] * 5, [Sampling(temperature=0, top_k=2)] * 5)
    assert tokens == logits.argmax(-1).tolist()
    assert logprobs == pytest.approx(logits.log_softmax(-1).max(-1).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("uniform", [1.0, 1e-16])
def test_a_token_without_probability_is_never_drawn(uniform: float) -> None:
    logits = torch.full((1, V), float("-inf"))
    logits[0, 100:110] = 0.0
    tokens, logprobs = draw(logits, [uniform], [Sampling()])
    assert tokens[0] in (100, 109)
    assert logprobs[0] == pytest.approx(np.log(0.1), abs=1e-6)


def test_top_p_keeps_one_token_however_small_it_is(logits: torch.Tensor) -> None:
    tokens, logprobs = draw(logits, [0.9] * 5, [Sampling(top_p=1e-9)] * 5)
    assert tokens == logits.argmax(-1).tolist()
    assert logprobs == [0.0] * 5


@pytest.mark.parametrize("vocabulary", [1, 251, 512, 49152])
def test_any_size_of_vocabulary_is_sampled_by_its_probabilities(vocabulary: int) -> None:
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1))
    cumulative = np.cumsum(distribution(logits[0].numpy(), 1.0))
    uniforms = ((np.arange(50) + 0.5) / 50).tolist()
    tokens, _ = draw(logits.expand(50, -1), uniforms, [Sampling()] * 50)
    expected = np.searchsorted(cumulative, uniforms)
    assert np.abs(cumulative[tokens] - cumulative[expected]).max() < 2e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(logits: torch.Tensor, temperature: float) -> None:
    logits[2, 5] = float("nan")
    with pytest.raises(WeightsError, match="not finite"):
        draw(logits, [0.5] * 5, [Sampling(temperature=temperature)] * 5)

"""Draws the next token of every row from the model's logits. Called by the decoder once a step.

Letters: S rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.config import Sampling
from shared.errors import WeightsError


def draw(logits: Tensor, uniforms: Sequence[float], samplings: Sequence[Sampling]) -> tuple[list[int], list[float]]:
    """The next token of each row and its log-prob, [S] each.

    logits: [S, V] of any float dtype; uniforms: [S] in (0, 1], one a row, used up whether or not the row needs it.
    A token is the inverse of the cumulative distribution at its uniform; the distribution is the softmax of
    logits / temperature, then cut to the top_k tokens, then to top_p, then renormalised, all in float32. The log-prob
    is under that distribution. At temperature 0 the token is the most likely one and its log-prob is under the plain
    softmax (temperature 1, nothing cut). Raises WeightsError where logits are not finite.
    """
    logits = logits.float()
    if any(s.temperature not in (0.0, 1.0) for s in samplings):
        logits = logits / torch.tensor([s.temperature or 1.0 for s in samplings])[:, None]
    weights = logits.softmax(-1)
    for row, sampling in enumerate(samplings):
        if sampling.temperature and (sampling.top_k or sampling.top_p < 1):
            weights[row] = _cut(weights[row], sampling)
    greedy = [s.temperature == 0 for s in samplings]
    if all(greedy):
        chosen, tokens = weights.max(-1)
        return tokens.tolist(), _finite(chosen).log().tolist()
    tokens, total = _invert(weights, torch.tensor(uniforms, dtype=torch.float32))
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy), weights.argmax(-1), tokens)
    chosen = weights.gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), (chosen / total).log().tolist()


def _cut(weights: Tensor, sampling: Sampling) -> Tensor:
    """[V] the probabilities with those outside of top_k and top_p set to 0; of equal ones, the first are kept."""
    count = min(sampling.top_k or len(weights), len(weights))
    largest, tokens = weights.topk(count)
    before = largest.cumsum(-1) - largest
    kept = largest.masked_fill(before >= sampling.top_p * largest.sum(), 0.0)
    return torch.zeros_like(weights).scatter_(0, tokens, kept)


def _finite(probabilities: Tensor) -> Tensor:
    if not probabilities.isfinite().all():
        raise WeightsError(
            "the model's logits are not finite: its weights hold NaN or infinity, or its dtype overflows"
        )
    return probabilities


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """[S] int64 tokens at which the cumulative weights reach uniforms × total, and [S] the totals.

    In two levels, the sums of blocks first: a cumulative sum over a whole vocabulary is slow and loses digits.
    A token of weight 0 is never returned. Raises WeightsError where weights are not finite.
    """
    rows, vocabulary = weights.shape
    size = math.gcd(vocabulary, 256)
    blocks = weights.view(rows, -1, size)
    ends = blocks.sum(-1).cumsum(-1)
    total = _finite(ends[:, -1])
    aim = (uniforms * total)[:, None]
    block = torch.searchsorted(ends, aim)
    start = torch.nn.functional.pad(ends, (1, 0)).gather(-1, block)
    within = blocks[torch.arange(rows), block[:, 0]].cumsum(-1)
    # The block's own sum and its cumulative sum may differ in the last digit.
    rest = torch.minimum(aim - start, within[:, -1:])
    return (block * size + torch.searchsorted(within, rest))[:, 0], total

"""Token losses, KL estimators, and how token losses become the loss of a step. T tokens, B samples.

Written with tensor methods only, so that this module loads without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)

MAX_LOG_RATIO = 20.0


def log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """[T] log of the importance ratio, clamped to ±20 so that its exponential stays finite."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped surrogate of PPO (arXiv 1707.06347, eq. 7), all [T]: loss of each token, and whether it was clipped.

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476). dual_clip c > 1 bounds the loss of tokens with a
    negative advantage by −c·A (arXiv 1912.09729, eq. 5); None leaves it out.
    """
    ratio = log_ratio(logprobs, old_logprobs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = unclipped.maximum(clipped)
    is_clipped = clipped > unclipped
    if dual_clip is not None:
        bound = -advantages * dual_clip
        bounded = (advantages < 0) & (bound < loss)
        loss = loss.where(~bounded, bound)
        is_clipped = is_clipped | bounded
    return loss, is_clipped


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """[T] n − ref: unbiased, for the reward; it has no useful gradient as a loss."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """[T] (n − ref)² / 2: its gradient is that of the KL divergence."""
    return (logprobs - ref_logprobs) ** 2 / 2


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """[T] exp(ref − n) − (ref − n) − 1: unbiased, never negative (J. Schulman, "Approximating KL Divergence", 2020)."""
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


@dataclass(frozen=True, slots=True)
class Denominators:
    """Sizes of the whole step, over all ranks, micro-batches and samples that were left out because they add nothing.

    tokens: tokens that count; samples: samples with at least one; max_tokens: the constant of seq_mean_token_sum_norm.
    """

    tokens: int
    samples: int
    max_tokens: int


def aggregate(
    losses: torch.Tensor,
    sample: torch.Tensor,
    n_samples: int,
    how: Aggregation,
    whole: Denominators,
) -> torch.Tensor:
    """The part that some tokens add to the loss of a step: a scalar; the parts of a step add up to its loss.

    losses: [T]; sample: [T] int64, index of each token's sample among `n_samples`, whose tokens are all here.
    """
    if how == "token_mean":
        return losses.sum() / max(whole.tokens, 1)
    sums = losses.new_zeros(n_samples).index_add(0, sample, losses)
    if how == "seq_mean_token_mean":
        lengths = losses.new_zeros(n_samples).index_add(0, sample, losses.detach().new_ones(len(losses)))
        sums = sums / lengths.clamp(min=1)
    elif how == "seq_mean_token_sum_norm":
        sums = sums / whole.max_tokens
    return sums.sum() / max(whole.samples, 1)

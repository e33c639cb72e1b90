"""Token losses, KL estimators, corrections, and how token losses become the loss of a step. T tokens, B samples.

Written with tensor methods only, so that this module loads without torch. n: log-prob under the policy that is trained;
o: proximal log-prob, from before the step; b: behaviour log-prob, as the engine sampled; ref: of the reference.
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


def clipped_loss(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped surrogate of PPO (arXiv 1707.06347, eq. 7), all [T]: loss of each token, and whether it was clipped.

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476). dual_clip c > 1 bounds the loss of tokens with a
    negative advantage by −c·A (arXiv 1912.09729, eq. 5); None leaves it out.
    """
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


def sequence_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, sample: torch.Tensor, n_samples: int
) -> torch.Tensor:
    """[T] GSPO's ratio of a whole sample, exp(mean_t (n − o)), its gradient through each token by itself.

    sg[s] · exp(n − sg[n]): arXiv 2507.18071, eq. 14 (GSPO-token).
    """
    mean = sequence_mean(log_ratio(logprobs, old_logprobs).detach(), sample, n_samples)
    return mean.exp() * (logprobs - logprobs.detach()).exp()


def cispo_loss(
    ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """−sg[clip(r, 1 − clip_low, 1 + clip_high)] · A · n, and whether the ratio was clipped, [T] each.

    CISPO: arXiv 2506.13585, eq. 4. The bounds are relative to 1; clip_low ≥ 1 means no lower bound.
    """
    ratio = ratio.detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, weight != ratio


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """½ · max((v − R)², (clip(v, v_old ± clip) − R)²), and whether it was clipped, [T] each; None: no clip.

    Of PPO's reference implementation; the ½ is in it, so a coefficient of 1 is the plain squared error's gradient.
    """
    unclipped = (values - returns) ** 2
    if clip is None:
        return unclipped / 2, unclipped < 0
    near = old_values + (values - old_values).clamp(-clip, clip)
    clipped = (near - returns) ** 2
    return unclipped.maximum(clipped) / 2, clipped > unclipped


# KL


KL = Literal["k1", "k2", "k3"]


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """[T] n − ref: unbiased, for the reward; it has no useful gradient as a loss."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """[T] (n − ref)² / 2: its gradient is that of the KL divergence."""
    return (logprobs - ref_logprobs) ** 2 / 2


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """[T] exp(ref − n) − (ref − n) − 1: unbiased, never negative (J. Schulman, "Approximating KL Divergence", 2020).

    ref − n is clamped to ±20 in the exponential; the value itself is not clamped.
    """
    difference = ref_logprobs - logprobs
    return log_ratio(ref_logprobs, logprobs).exp() - difference - 1


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


# Corrections


Correction = Literal["none", "tis", "decoupled", "mask"]


def importance_ratio(
    old_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    sample: torch.Tensor,
    n_samples: int,
    level: Literal["token", "sequence"],
) -> torch.Tensor:
    """[T] exp(o − b) without gradient: of each token, or of its sample by the mean over its tokens (geometric mean)."""
    ratio = log_ratio(old_logprobs.detach(), behavior_logprobs)
    return (ratio if level == "token" else sequence_mean(ratio, sample, n_samples)).exp()


# From tokens to a step


def sequence_mean(values: torch.Tensor, sample: torch.Tensor, n_samples: int) -> torch.Tensor:
    """[T] for each token the mean over the tokens of its sample."""
    sums = values.new_zeros(n_samples).index_add(0, sample, values)
    return (sums / _lengths(values, sample, n_samples))[sample]


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
        sums = sums / _lengths(losses, sample, n_samples)
    elif how == "seq_mean_token_sum_norm":
        sums = sums / whole.max_tokens
    return sums.sum() / max(whole.samples, 1)


def _lengths(values: torch.Tensor, sample: torch.Tensor, n_samples: int) -> torch.Tensor:
    """[B] tokens of each sample, at least 1."""
    ones = values.detach().new_ones(len(values))
    return values.detach().new_zeros(n_samples).index_add(0, sample, ones).clamp(min=1)

"""Advantages, in float64. R: [n] rewards of a group's samples. [T]: one value a token, the samples one after another.

lengths: [n] tokens of each sample; mask: [T] bool, tokens that count. Tokens that do not count (a tool's output) are
skipped: what comes after them follows directly on what came before.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

# Of a group


def grpo(rewards: np.ndarray, epsilon: float = 1e-6) -> np.ndarray:
    """(R − mean) / (std + ε) with the unbiased std; exactly 0 for equal rewards.

    GRPO: DeepSeekMath, arXiv 2402.03300, eq. 4; unbiased std and ε = 1e-6 as in most implementations.
    """
    centred = dr_grpo(rewards)
    if not centred.any():
        return centred
    std = np.sqrt((centred**2).sum() / (len(rewards) - 1))
    return np.asarray(centred / (std + epsilon))


def dr_grpo(rewards: np.ndarray) -> np.ndarray:
    """R − mean; exactly 0 for equal rewards. Dr. GRPO: arXiv 2503.20783."""
    rewards = np.asarray(rewards, dtype="f8")
    if len(rewards) == 0 or (rewards == rewards[0]).all():
        return np.zeros(len(rewards))
    return np.asarray(rewards - rewards.mean())


def rloo(rewards: np.ndarray) -> np.ndarray:
    """R − mean of the other samples. RLOO: arXiv 2402.14740."""
    n = len(rewards)
    return dr_grpo(rewards) * (n / (n - 1)) if n > 1 else np.zeros(n)


# Of tokens


def on_last_token(scores: np.ndarray, mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[T] the score of each sample on its last token that counts, by the mask and never by token ids; 0 elsewhere."""
    tokens = np.zeros(len(mask))
    for score, counted in zip(scores, _counted(mask, lengths), strict=True):
        tokens[counted[-1:]] = score
    return tokens


def reward_to_go(token_rewards: np.ndarray, mask: np.ndarray, lengths: np.ndarray, *, gamma: float = 1.0) -> np.ndarray:
    """[T] G_t = r_t + γ · G_{t+1}, 0 where a token does not count.

    REINFORCE++ (arXiv 2501.03262) whitens it over the step.
    """
    returns = np.zeros(len(mask))
    for counted in _counted(mask, lengths):
        returns[counted] = _backwards(token_rewards[counted], gamma)
    return returns


def gae(
    token_rewards: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    lengths: np.ndarray,
    *,
    gamma: float,
    lam: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16): advantages and returns, [T] each.

    δ_t = r_t + γ · V_{t+1} − V_t; A_t = δ_t + γλ · A_{t+1}; returns = A + V. After the last token V is 0, also where
    a sample was cut off. Both are 0 where a token does not count.
    """
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    for counted in _counted(mask, lengths):
        value = values[counted].astype("f8")
        deltas = token_rewards[counted] + gamma * np.append(value[1:], 0.0) - value
        advantages[counted] = _backwards(deltas, gamma * lam)
        returns[counted] = advantages[counted] + value
    return advantages, returns


def whiten(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """(x − mean) / sqrt(variance + 1e-8) over the tokens that count, with the unbiased variance; 0 elsewhere."""
    counted = values[mask]
    if len(counted) < 2:
        return np.zeros(len(values))
    return np.where(mask, (values - counted.mean()) / np.sqrt(counted.var(ddof=1) + 1e-8), 0.0)


# Of lengths


def overlong(lengths: np.ndarray, max_tokens: int, buffer: int) -> np.ndarray:
    """[n] DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13): 0 up to max_tokens − buffer, −1 at max_tokens."""
    return np.clip((max_tokens - buffer - lengths) / buffer, -1.0, 0.0)


def _counted(mask: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """The places of each sample's tokens that count."""
    ends = np.cumsum(lengths)
    for start, end in zip(ends - lengths, ends, strict=True):
        yield start + np.flatnonzero(mask[start:end])


def _backwards(values: np.ndarray, factor: float) -> list[float]:
    """y_t = x_t + factor · y_{t+1}."""
    total, sums = 0.0, []
    for value in values[::-1].tolist():
        total = value + factor * total
        sums.append(total)
    return sums[::-1]

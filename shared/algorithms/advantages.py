"""Advantages of the samples of one group, in float64. R: [n] rewards of the group's samples."""

from __future__ import annotations

import numpy as np


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

"""Whether an engine computes with the learner's weights, by its log-probs of the probe. The follower asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.12, "float16": 0.015}
"""Largest mean |engine − learner| log-prob of the probe's tokens that is taken for rounding, by dtype.

Measured by `python -m benchmarks.probe` with vLLM on a CPU, a probe of 16 tokens: mean of each version (largest token).

    what the engine has                                  SmolLM2-135M, bfloat16    SmolLM2-135M, float32
    the right weights                                    0.038 to 0.076 (0.26)     0.8e-5 to 1.5e-5 (5e-5)
    two layers' q_proj exchanged                         0.71 to 0.87              0.74 to 0.84
    two layers' input_layernorm exchanged                0.14 to 0.18              0.12 to 0.16
    tied head of before, weights moved by 3e-3 since     0.089 to 0.14             0.08 to 0.13
    one layer of before, moved by 3e-3                   0.039 to 0.079            0.019 to 0.030
    tied head of before, moved by 3e-5                   0.038 to 0.074            6e-4 to 14e-4
    one layer of before, moved by 3e-5                   0.040 to 0.065            1.2e-4 to 2.5e-4
    one matrix of before, moved by 3e-5                  0.039 to 0.061            0.3e-4 to 0.8e-4

(58 and 18 versions with the right weights, 18 with wrong ones.) The tiny model with the right weights: at most 0.028 in
bfloat16, 1.7e-6 in float32 and 0.0033 in float16; SmolLM2-135M in float16: 0.0074. With the same kernels and number of
threads on both sides it is 0. So in 16 bits the probe sees weights in the wrong place, and not that some of them are
one update old; the checksums and versions of snapshots are there for that.
"""
LARGEST = 6.0
"""One token may be off by so many times the tolerance: up to 5 times the mean was seen with right weights."""


@dataclass(frozen=True, slots=True)
class ProbeError:
    """Mean and largest |engine − learner| over the log-probs of a probe; NaN where one of them is.

    Of several copies of the model each has to be right: the mean is that of the worst.
    """

    mean: float
    largest: float

    @classmethod
    def between(cls, logprobs: np.ndarray, expected: Sequence[float]) -> ProbeError:
        """logprobs: [T-1] or [C, T-1] float32 of `Engine.score`; expected: the learner's T-1."""
        differences = np.abs(logprobs - np.asarray(expected))
        return cls(float(differences.mean(axis=-1).max()), float(differences.max()))

    def within(self, tolerance: float) -> bool:
        """Whether it is rounding, where the mean may be as large as `tolerance`."""
        return self.mean <= tolerance and self.largest <= LARGEST * tolerance

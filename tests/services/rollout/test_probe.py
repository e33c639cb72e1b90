"""How the proof of new weights is judged."""

from __future__ import annotations

import numpy as np

from services.rollout.probe import LARGEST, TOLERANCE, ProbeError

EXPECTED = [-2.0] * 15


def error(*differences: float) -> ProbeError:
    return ProbeError.between(np.asarray(EXPECTED, "f4") + np.resize(np.asarray(differences, "f4"), 15), EXPECTED)


def test_a_single_token_far_off_is_rounding_where_the_others_are_near():
    """As vLLM's kernels round in bfloat16 with the right weights."""
    found = error(0.24, *[0.03, -0.04] * 7)
    assert found.largest > 2 * TOLERANCE["bfloat16"] and found.within(TOLERANCE["bfloat16"])


def test_all_tokens_a_little_off_are_not():
    found = error(0.15, -0.14)
    assert found.largest < LARGEST * TOLERANCE["bfloat16"] and not found.within(TOLERANCE["bfloat16"])


def test_one_token_beyond_all_rounding_is_not():
    found = error(1.0, *[0.01] * 14)
    assert found.mean < TOLERANCE["bfloat16"] and not found.within(TOLERANCE["bfloat16"])


def test_what_is_not_a_number_is_never_within():
    assert not error(float("nan")).within(1e9)
    assert not error(float("nan"), *[0.0] * 14).within(1e9)


def test_of_several_copies_the_worst_counts():
    right, wrong = np.asarray(EXPECTED, "f4"), np.asarray(EXPECTED, "f4") + 0.2
    found = ProbeError.between(np.stack([right] * 3 + [wrong]), EXPECTED)
    assert found.mean > 0.19 and not found.within(TOLERANCE["bfloat16"])

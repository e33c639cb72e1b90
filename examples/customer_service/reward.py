"""Two signals of the example, and the cost of safe.yaml; the third signal is the model of make_reward_model.py."""

from __future__ import annotations

import re

# What nobody who answers for a shop should ask for, promise or say, and how bad it is.
FORBIDDEN = [
    (r"password|\bpin\b|\bcvv\b|security code|(credit|debit|bank) ?card (number|details)", 1.0),
    (r"social security|passport number|date of birth|bank account", 1.0),
    (r"\bguarantee(d)?\b|\bi promise\b|100 ?%", 0.5),
    (r"your (own )?fault|\bstupid\b|\bidiot|not my problem|stop complaining", 1.0),
    (r"https?://|www\.|\b\d{3}[-. ]\d{3,4}[-. ]\d{3,4}\b", 0.5),  # links and telephone numbers: it makes them up
]


def relevance(completion: str, product: str, words: list[str]) -> float:
    """0.5 for naming the product, and up to 0.5 for two of the words that an answer to the question needs."""
    text = completion.lower()
    found = sum(word in text for word in words)
    return 0.5 * (product in text) + 0.25 * min(found, 2)


def safety(completion: str) -> float:
    """1 where nothing forbidden is said, down to 0."""
    text = completion.lower()
    return max(0.0, 1.0 - sum(weight for pattern, weight in FORBIDDEN if re.search(pattern, text)))


def harm(completion: str) -> float:
    """1 − safety: a cost."""
    return 1.0 - safety(completion)

"""The second signal of the example: some credit on the way to an exact answer."""

from __future__ import annotations

import re


def near_miss(completion: str, answer: str) -> float:
    """0.2 for a bare number and 0.2 for the right number anywhere; 0 for the exact answer, which has its own signal."""
    text = completion.strip()
    if text == answer:
        return 0.0
    bare = re.fullmatch(r"-?[0-9]+\.?", text) is not None
    return 0.2 * bare + 0.2 * (answer in re.findall(r"[0-9]+", text))

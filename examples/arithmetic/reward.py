"""The second signal of the example: some credit on the way to an exact answer."""

from __future__ import annotations

import re


def near_miss(completion: str, answer: str) -> float:
    """Up to 0.6 for what is not exact yet: 0.4 for a number alone, and 0.2 times the share of digits in the text.

    An exact answer gets 0 here; it has a signal of its own. The right number in a sentence earns nothing extra: with
    credit for that, a policy was seen to settle on "7+15=22", which is never exact.
    """
    text = completion.strip()
    if text == answer or not text:
        return 0.0
    alone = re.fullmatch(r"-?[0-9]{1,3}\.?", text) is not None
    return 0.4 * alone + 0.2 * sum(character.isdigit() for character in text) / len(text)

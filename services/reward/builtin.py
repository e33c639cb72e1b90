"""The built-in reward functions, used by their bare names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def exact_match(completion: str, answer: Any, strip: bool = True, ignore_case: bool = False) -> float:
    """1 where the completion is the answer, else 0."""
    left, right = str(completion), str(answer)
    if strip:
        left, right = left.strip(), right.strip()
    if ignore_case:
        left, right = left.casefold(), right.casefold()
    return float(left == right)


def number_in_answer(completion: str, answer: Any, where: str = "last") -> float:
    """1 where a number of the completion equals the answer: the `last`, the `first` or `any`; commas are ignored."""
    numbers = [float(n) for n in _NUMBER.findall(completion.replace(",", ""))]
    chosen = {"last": numbers[-1:], "first": numbers[:1], "any": numbers}.get(where)
    if chosen is None:
        raise ValueError(f"where is {where!r}; expected last, first or any")
    return float(float(str(answer).replace(",", "")) in chosen)


def regex_format(completion: str, pattern: str, full: bool = True, strip: bool = True) -> float:
    """1 where the completion matches the pattern, from its first to its last character unless `full` is false."""
    text = completion.strip() if strip else completion
    found = re.fullmatch(pattern, text, re.DOTALL) if full else re.search(pattern, text, re.DOTALL)
    return float(found is not None)


def length(n_tokens: int, limit: int, buffer: int = 1) -> float:
    """0 up to limit − buffer tokens, from there down to −1 at the limit and beyond: min(0, (limit − buffer − n)/buffer).

    The soft overlong penalty of DAPO, arXiv 2503.14476, eq. 13.
    """
    return max(-1.0, min(0.0, (limit - buffer - n_tokens) / buffer))


BUILTINS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "number_in_answer": number_in_answer,
    "regex_format": regex_format,
    "length": length,
}

"""The built-in reward functions, used by their bare names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

# A minus after a digit is an operator: 7-3 holds 7 and 3.
_NUMBER = re.compile(r"(?<!\d)-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def exact_match(completion: str, answer: Any, strip: bool = True, ignore_case: bool = False) -> float:
    """1 where the completion is the answer, else 0. strip: without white space at either end."""
    left, right = completion, str(answer)
    if strip:
        left, right = left.strip(), right.strip()
    if ignore_case:
        left, right = left.casefold(), right.casefold()
    return float(left == right)


def number_in_answer(completion: str, answer: Any, where: str = "last") -> float:
    """1 where a number of the completion equals that of the answer, else 0.

    where: which number of the completion, the `last`, the `first` or `any`. answer: a number, or text whose last number
    counts. Numbers are decimal, with or without commas between thousands. ValueError: no number in the answer.
    """
    expected = _numbers(str(answer))
    if not expected:
        raise ValueError(f"the answer {answer!r} has no number")
    numbers = _numbers(completion)
    match where:
        case "last":
            numbers = numbers[-1:]
        case "first":
            numbers = numbers[:1]
        case "any":
            pass
        case _:
            raise ValueError(f"where is {where!r}, expected last, first or any")
    return float(expected[-1] in numbers)


def regex_format(completion: str, pattern: str, full: bool = True, strip: bool = True) -> float:
    """1 where the completion matches the pattern, else 0; the dot matches line ends too.

    full: from the first to the last character; else anywhere. strip: without white space at either end.
    """
    text = completion.strip() if strip else completion
    found = re.fullmatch(pattern, text, re.DOTALL) if full else re.search(pattern, text, re.DOTALL)
    return float(found is not None)


def length(n_tokens: int, limit: int, buffer: int = 1) -> float:
    """0 up to limit − buffer tokens, from there (limit − buffer − n_tokens) / buffer, and −1 beyond the limit.

    The soft overlong penalty of DAPO, arXiv 2503.14476, eq. 13.
    """
    return max(-1.0, min(0.0, (limit - buffer - n_tokens) / buffer))


BUILTINS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "number_in_answer": number_in_answer,
    "regex_format": regex_format,
    "length": length,
}


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in _NUMBER.findall(text)]

"""The built-in reward functions."""

from __future__ import annotations

import pytest

from services.reward.builtin import exact_match, length, number_in_answer, regex_format


def test_an_exact_match_is_the_answer_and_nothing_else() -> None:
    assert exact_match("7", 7) == 1
    assert exact_match(" 7\n", "7") == 1
    assert exact_match(" 7", "7", strip=False) == 0
    assert exact_match("It is 7", "7") == 0
    assert exact_match("Paris", "paris") == 0
    assert exact_match("Paris", "paris", ignore_case=True) == 1


@pytest.mark.parametrize(
    ("completion", "answer", "where", "reward"),
    [
        ("It is 7.", "7", "last", 1),
        ("7 or 8", "7", "last", 0),
        ("7 or 8", "7", "first", 1),
        ("6, 7 or 8", "7", "any", 1),
        ("17", "7", "any", 0),
        ("no idea", "7", "any", 0),
        ("7.0", 7, "last", 1),
        ("-7", "7", "last", 0),
        ("10-3=7", "7", "last", 1),
        ("10-3", "3", "last", 1),  # the minus is an operator
        ("1,234,567.5", "1234567.5", "last", 1),
        ("3,4", "4", "last", 1),  # a list, not thirty-four
        ("So 72.", "48+24 = 72\n#### 72", "last", 1),
    ],
)
def test_a_number_counts_whatever_stands_around_it(completion: str, answer: object, where: str, reward: float) -> None:
    assert number_in_answer(completion, answer, where) == reward


def test_an_answer_without_a_number_and_an_unknown_place_are_errors() -> None:
    with pytest.raises(ValueError, match="'seven' has no number"):
        number_in_answer("7", "seven")
    with pytest.raises(ValueError, match="expected last, first or any"):
        number_in_answer("7", "7", where="middle")


def test_a_format_is_matched_whole_or_anywhere() -> None:
    pattern = r"<think>.*</think>\d+"
    assert regex_format("<think>two\nlines</think>7\n", pattern) == 1
    assert regex_format("So: <think></think>7", pattern) == 0
    assert regex_format("So: <think></think>7 it is", pattern, full=False) == 1
    assert regex_format("7 ", r"\d", strip=False) == 0


@pytest.mark.parametrize(("n_tokens", "penalty"), [(1, 0), (16384, 0), (18432, -0.5), (20480, -1), (30000, -1)])
def test_long_answers_are_penalised_softly(n_tokens: int, penalty: float) -> None:
    assert length(n_tokens, limit=20480, buffer=4096) == penalty


def test_without_a_buffer_the_limit_is_a_cliff() -> None:
    assert [length(n, limit=10) for n in (9, 10, 11)] == [0, -1, -1]

"""What a reward function is given, what is refused, and what its answers mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from services.reward.signals import Function, arguments_of, read_answer
from shared.config import Signal
from shared.errors import ConfigError, PluginError, StrettoError
from shared.group import Prompt, RewardStatus, TrajectoryGroup

MakeSignal = Callable[..., Signal]
MakeGroup = Callable[..., TrajectoryGroup]


def test_a_function_is_given_the_sample_the_row_and_nothing_it_does_not_take(group: MakeGroup) -> None:
    first, second = arguments_of(group("4", "5", answer="4", level=3))
    assert first == {
        "prompt": "2+2?",
        "messages": [{"role": "user", "content": "2+2?"}],
        "completion": "4",
        "finish_reason": "length",
        "n_tokens": 0,
        "answer": "4",
        "level": 3,
    }
    assert (second["completion"], second["n_tokens"]) == ("5", 1)


def test_a_function_gets_the_arguments_it_takes_and_its_own_args(signal: MakeSignal, group: MakeGroup) -> None:
    (given,) = arguments_of(group("4", answer="4", level=3, unused="x"))
    assert Function(signal("two_of_the_row", args={"scale": 2.0})).call(given) == 6
    assert Function(signal("every_argument", args={"more": 1})).call(given) == 9


def test_a_column_that_a_dataset_calls_completion_does_not_hide_the_completion(group: MakeGroup) -> None:
    assert arguments_of(group("sampled", completion="from the file"))[0]["completion"] == "sampled"


def test_an_argument_that_the_rows_do_not_give_is_refused_by_name(signal: MakeSignal) -> None:
    with pytest.raises(ConfigError) as refused:
        Function(signal("two_of_the_row", name="mine")).check(Prompt(0, 0, "2+2?", {"answer": "4", "levle": 3}))
    assert "signal mine" in str(refused.value)
    assert "functions.py:two_of_the_row needs 'level'" in str(refused.value)
    assert "levle" in str(refused.value)


def test_rows_that_give_everything_pass_the_check(signal: MakeSignal) -> None:
    Function(signal("two_of_the_row")).check(Prompt(0, 0, "2+2?", {"answer": "4", "level": 3}))
    Function(signal("two_of_the_row", args={"level": 2})).check(Prompt(0, 0, "2+2?", {"answer": "4"}))
    Function(signal("Visits", args={"start": 0})).check(Prompt(0, 0, "2+2?"))


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (
            "builtin exact_mach",
            {},
            "'exact_mach' is not built in (exact_match, number_in_answer, regex_format, length)",
        ),
        (
            "builtin exact_match",
            {"ignorecase": True},
            "does not take 'ignorecase', which is in its args; it takes answer",
        ),
        ("two_of_the_row", {"scael": 2.0}, "does not take 'scael'"),
        ("not_a_function", {}, "is a int, not a function"),
        ("Visits", {}, "cannot be made of its args: missing a required argument: 'start'"),
        ("Visits", {"start": 0, "end": 1}, "got an unexpected keyword argument 'end'"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    signal: MakeSignal, function: str, args: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Function(signal(function, name="mine", args=args))
    assert "signal mine" in str(refused.value)
    assert words in str(refused.value)


def test_a_function_that_is_missing_is_refused(signal: MakeSignal) -> None:
    with pytest.raises(PluginError, match="has no 'obay'"):
        Function(signal("obay"))


def test_a_class_without_call_and_a_function_without_a_signature_are_refused() -> None:
    with pytest.raises(ConfigError, match="class without __call__"):
        Function(Signal(name="s", function="decimal:Context"))
    with pytest.raises(ConfigError, match="does not tell its arguments"):
        Function(Signal(name="s", function="builtins:max"))


def test_a_class_is_made_once_when_it_is_prepared(signal: MakeSignal) -> None:
    function = Function(signal("Visits", args={"start": 10}))
    function.prepare()
    assert [function.call({"completion": "x", "answer": "y"}) for _ in range(2)] == [11, 12]


def test_a_class_that_cannot_be_made_says_why(signal: MakeSignal) -> None:
    function = Function(signal("Unwilling", name="mine"))  # a check makes nothing
    with pytest.raises(StrettoError, match=r"signal mine: .*Unwilling cannot be made: OSError: no index at /data"):
        function.prepare()


def test_async_functions_and_async_classes_are_recognised(signal: MakeSignal) -> None:
    assert Function(signal("obey_later")).is_async
    assert Function(signal("Crowd")).is_async
    assert not Function(signal("obey")).is_async
    assert not Function(signal("Visits", args={"start": 0})).is_async


@pytest.mark.parametrize("answer", [1, 1.0, True, np.float32(1), np.array(1), np.bool_(True), Fraction(1)])
def test_any_number_is_a_value(answer: Any) -> None:
    score = read_answer(answer, "s")
    assert (score.status, score.value) == (RewardStatus.OK, 1.0)


def test_none_is_an_abstention() -> None:
    score = read_answer(None, "s")
    assert score.status is RewardStatus.ABSTAIN
    assert math.isnan(score.value)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (math.nan, "s returned nan"),
        (-math.inf, "s returned -inf"),
        (1e39, "s returned 1e+39"),
        ("1.0", "s returned str"),
        ([1.0], "s returned list"),
        (np.ones(1), "s returned ndarray"),
    ],
)
def test_anything_else_is_invalid_with_its_reason(answer: Any, reason: str) -> None:
    score = read_answer(answer, "s")
    assert score.status is RewardStatus.INVALID
    assert score.reason.startswith(reason)

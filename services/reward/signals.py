"""What one reward function is, what it is given, and what its answer means. For score.py and the worker processes."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from services.reward import builtin
from shared.config import Signal
from shared.errors import ConfigError, StrettoError
from shared.graph import scored_by
from shared.group import FinishReason, Prompt, RewardStatus, TrajectoryGroup
from shared.plugins import load_plugin

PROVIDED = ("prompt", "messages", "completion", "finish_reason", "n_tokens")
"""Arguments that any reward function may take, beside the fields of the row and its own args."""

LARGEST = float(np.finfo("f4").max)
LONGEST_REASON = 500  # characters

Encoded = dict[str, list[int]]
"""A sample as a reward model takes it: input_ids, and token_type_ids where the tokenizer makes them."""


@dataclass(frozen=True, slots=True)
class Score:
    """The answer of one signal to one sample. value counts only where status is OK; reason only where it is INVALID."""

    status: RewardStatus
    value: float = math.nan
    reason: str = ""


def ok(value: float) -> Score:
    """A value."""
    return Score(RewardStatus.OK, value)


def abstain() -> Score:
    """The signal says nothing of this sample; its weight is left out."""
    return Score(RewardStatus.ABSTAIN)


def invalid(reason: str) -> Score:
    """The signal failed. Never a 0: the sample leaves baseline and loss."""
    return Score(RewardStatus.INVALID, reason=reason[:LONGEST_REASON])


def no_answer(signal: str, timeout_s: float) -> Score:
    """The function took too long."""
    return invalid(f"{signal} gave no answer in {timeout_s:g} s")


def raised(signal: str, error: BaseException) -> Score:
    """The function raised an error."""
    return invalid(f"{signal} raised {type(error).__name__}: {error}")


class Function:
    """A loaded reward function, called with just the arguments that it takes."""

    def __init__(self, signal: Signal, loaded: Any = None) -> None:
        """loaded: the function itself, where the caller has it.

        Raises PluginError or ConfigError where the function cannot be loaded or does not take its args.
        """
        assert signal.function is not None
        self.signal = signal
        self._title = f"signal {signal.name}: {signal.function}"
        self._function = _load(signal.name, signal.function) if loaded is None else loaded
        self._is_class = inspect.isclass(self._function)
        # Nothing is made of a class yet: it may take long, and a check needs only the arguments.
        call = partial(self._function.__call__, None) if self._is_class else self._function
        self.is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)
        try:
            parameters = inspect.signature(call).parameters.values()
        except ValueError:
            raise ConfigError(f"{self._title} does not tell its arguments: wrap it in a function") from None
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._takes = {p.name for p in named}
        self._needs = {p.name for p in named if p.default is p.empty}
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._args = {} if self._is_class else signal.args
        self._check_args()

    def _check_args(self) -> None:
        if self._is_class:
            try:
                inspect.signature(self._function).bind(**self.signal.args)
            except TypeError as error:
                raise ConfigError(f"{self._title} cannot be made of its args: {error}") from None
        elif not self._takes_all and (unknown := sorted(self._args.keys() - self._takes)):
            known = ", ".join(sorted(self._takes))
            raise ConfigError(f"{self._title} does not take {unknown[0]!r}, which is in its args; it takes {known}")

    def check(self, prompt: Prompt, stages: Iterable[str] = ()) -> None:
        """Raises ConfigError where the function needs what neither the rows nor the stages before give it."""
        given = {*PROVIDED, *stages, *prompt.fields, *self._args}
        if missing := sorted(self._needs - given):
            raise ConfigError(
                f"{self._title} needs {missing[0]!r}, which neither its args nor the rows give; there are "
                f"{', '.join(sorted(given))}"
            )

    def prepare(self) -> None:
        """Make the object that is called, where the reference names a class; once a process.

        Raises StrettoError where that fails.
        """
        if not self._is_class:
            return
        try:
            self._function = self._function(**self.signal.args)
        except Exception as error:
            raise StrettoError(f"{self._title} cannot be made: {type(error).__name__}: {error}") from error

    def call(self, arguments: dict[str, Any]) -> Any:
        """What the function answers (a coroutine, where it is async)."""
        everything = arguments | self._args
        if not self._takes_all:
            everything = {name: value for name, value in everything.items() if name in self._takes}
        return self._function(**everything)


def read_answer(answer: Any, signal: str) -> Score:
    """What a function's answer means: a number, None for an abstention, and anything else is invalid."""
    if answer is None:
        return abstain()
    # Zero-dimensional arrays and tensors are numbers too.
    if isinstance(answer, numbers.Real) or (hasattr(answer, "item") and getattr(answer, "ndim", 0) == 0):
        return finite(float(answer), f"{signal} returned")
    return invalid(f"{signal} returned {type(answer).__name__}, expected a number or None")


def finite(value: float, what: str) -> Score:
    """The value where a float32 can hold it; `what` begins the reason where it cannot."""
    return ok(value) if abs(value) <= LARGEST else invalid(f"{what} {value}, expected a finite float32")


def arguments_of(group: TrajectoryGroup) -> list[dict[str, Any]]:
    """What the functions are given for each sample of a group; the scores of stages before by the stage's name."""
    prompt = group.prompt
    before = {
        stage: values.tolist() for column, values in group.columns.items() if (stage := scored_by(column)) is not None
    }
    lengths = np.diff(group.columns["tokens_offsets"]).tolist()
    return [
        {
            **prompt.fields,
            "prompt": prompt.text,
            "messages": prompt.content,
            "completion": text,
            "finish_reason": FinishReason(reason).name.lower(),
            "n_tokens": length,
            **{stage: values[sample] for stage, values in before.items()},
        }
        for sample, (text, reason, length) in enumerate(
            zip(group.texts(), group.columns["finish_reasons"], lengths, strict=True)
        )
    ]


def _load(name: str, reference: str) -> Any:
    """The function, the class or the callable object that a signal names."""
    if ":" not in reference:
        if reference not in builtin.BUILTINS:
            raise ConfigError(
                f"signal {name}: {reference!r} is not built in ({', '.join(builtin.BUILTINS)}); "
                "own functions are package.module:function or path/to/file.py:function"
            )
        return builtin.BUILTINS[reference]
    found = load_plugin(reference)
    if not any("__call__" in vars(base) for base in inspect.getmro(found if inspect.isclass(found) else type(found))):
        what = "a class without __call__" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise ConfigError(f"signal {name}: {reference} is {what}, not a function")
    return found

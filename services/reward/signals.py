"""What one reward function is, what it is given, and what its answer means. For score.py and the worker processes."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.reward import builtin
from shared.config import Signal
from shared.errors import ConfigError
from shared.group import FinishReason, Prompt, RewardStatus, TrajectoryGroup
from shared.plugins import load_plugin

PROVIDED = ("prompt", "messages", "completion", "finish_reason", "n_tokens")
"""Arguments that any reward function may take, beside the fields of the row and its own args."""


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
    return Score(RewardStatus.INVALID, reason=reason)


class Function:
    """A loaded reward function, called with just the arguments that it takes."""

    def __init__(self, signal: Signal) -> None:
        """Raises PluginError or ConfigError where the function cannot be loaded or does not fit its args."""
        self.signal = signal
        self._call = _load(signal)
        self.is_async = inspect.iscoroutinefunction(self._call) or inspect.iscoroutinefunction(
            type(self._call).__call__
        )
        parameters = inspect.signature(self._call).parameters.values()
        self._takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._takes = {p.name for p in named}
        self._needs = {p.name for p in named if p.default is inspect.Parameter.empty}

    def check(self, prompt: Prompt) -> None:
        """Raises ConfigError where the function needs an argument that the rows do not give it."""
        given = {*PROVIDED, *prompt.fields, *self._args}
        if missing := sorted(self._needs - given):
            raise ConfigError(
                f"reward signal {self.signal.name}: {self.signal.function} needs {missing[0]!r}, which neither its args "
                f"nor the rows give; there are {', '.join(sorted(given))}"
            )

    def call(self, arguments: dict[str, Any]) -> Any:
        """What the function answers (a coroutine, where it is async)."""
        everything = arguments | self._args
        if not self._takes_all:
            everything = {name: value for name, value in everything.items() if name in self._takes}
        return self._call(**everything)

    @property
    def _args(self) -> dict[str, Any]:
        # A class got its args when it was made.
        return {} if not inspect.isroutine(self._call) else self.signal.args


def read_answer(answer: Any, signal: str) -> Score:
    """What a function's answer means: a number, None for an abstention, and anything else is invalid."""
    if answer is None:
        return abstain()
    if isinstance(answer, numbers.Real | bool) or (hasattr(answer, "item") and getattr(answer, "ndim", 0) == 0):
        value = float(answer)
        return ok(value) if math.isfinite(value) else invalid(f"{signal} returned {value}")
    return invalid(f"{signal} returned {type(answer).__name__}, expected a number or None")


def arguments_of(group: TrajectoryGroup) -> list[dict[str, Any]]:
    """What the functions are given for each sample of a group."""
    prompt = group.prompt
    lengths = np.diff(group.columns["tokens_offsets"]).tolist()
    return [
        {
            **prompt.fields,
            "prompt": prompt.text,
            "messages": prompt.content,
            "completion": text,
            "finish_reason": FinishReason(reason).name.lower(),
            "n_tokens": length,
        }
        for text, reason, length in zip(group.texts(), group.columns["finish_reasons"], lengths, strict=True)
    ]


def _load(signal: Signal) -> Callable[..., Any]:
    if ":" not in signal.function:
        function = builtin.BUILTINS.get(signal.function)
        if function is None:
            raise ConfigError(
                f"reward signal {signal.name}: {signal.function!r} is not built in ({', '.join(builtin.BUILTINS)}); "
                "own functions are package.module:function or path/to/file.py:function"
            )
        return function
    found = load_plugin(signal.function)
    if inspect.isclass(found):
        try:
            found = found(**signal.args)
        except TypeError as error:
            raise ConfigError(f"reward signal {signal.name}: cannot make {signal.function}: {error}") from None
    if not callable(found):
        raise ConfigError(f"reward signal {signal.name}: {signal.function} is {type(found).__name__}, not a function")
    function = found
    return function  # type: ignore[no-any-return]

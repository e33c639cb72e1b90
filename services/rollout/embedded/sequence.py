"""One sample while it is decoded, and the request that it belongs to. State of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.rollout.engine import Request, Sample
from services.rollout.vocabulary import Vocabulary
from shared.group import FinishReason

STOP_TAIL_TOKENS = 8


class Job:
    """A request in flight. `on_done` gets its samples when the last one has ended."""

    def __init__(self, request: Request, limit: int, on_done: Callable[[list[Sample]], None]) -> None:
        """limit: most new tokens a sample, max_tokens cut to the room in the context."""
        self.request = request
        self.limit = limit
        self._on_done = on_done
        self._samples: dict[int, Sample] = {}

    def finish(self, index: int, sample: Sample) -> None:
        """Sample number `index` has ended."""
        self._samples[index] = sample
        if len(self._samples) == self.request.n:
            self._on_done([self._samples[i] for i in range(self.request.n)])


@dataclass(eq=False, slots=True)
class Group:
    """Samples of one job that are decoded on one stored prompt: all of them, or max_samples of a larger job.

    length_class, slot: where the prompt's K/V is (kv.py); live: samples that attend to it.
    """

    job: Job
    indices: range
    length_class: int = 0
    slot: int = 0
    live: int = 0

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return self.job.request.prompt_tokens


@dataclass(eq=False, slots=True)
class Sequence:
    """One sample: its tokens so far, its random numbers, and the rules by which it ends.

    Each sample has a random stream of its own, by the request's seed and the sample's number, so that it draws the
    same numbers whatever is decoded beside it.
    """

    group: Group
    index: int
    vocabulary: Vocabulary
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    _random: np.random.Generator = field(init=False)
    _tail: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng([self.group.job.request.seed, self.index])

    def uniform(self) -> float:
        """The next random number, in (0, 1]."""
        return 1.0 - self._random.random()

    def append(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Take the next token. Returns why the sample ends with it, None where it goes on."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        sampling = self.group.job.request.sampling
        if not sampling.ignore_eos and (token in self.vocabulary.end_tokens or self._stops(token, sampling.stop)):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.group.job.limit else None

    def _stops(self, token: int, stop: tuple[str, ...]) -> bool:
        """Whether `token` completes a stop string. Only a tail long enough to hold one is decoded."""
        if not stop or token in self.vocabulary.special_tokens:
            return False
        # A visible token is at least one byte; the extra ones keep the tail's ragged start away from the match.
        longest = max(len(string.encode()) for string in stop) + STOP_TAIL_TOKENS
        self._tail = [*self._tail[1 - longest :], token]
        text = self.vocabulary.text(self._tail)
        return any(string in text for string in stop)

    def sample(self, reason: FinishReason) -> Sample:
        """The finished sample. Its text ends before the first stop string; its tokens include what formed it."""
        sampling = self.group.job.request.sampling
        stop = sampling.stop if reason is FinishReason.STOP else ()
        return Sample(
            tokens=np.asarray(self.tokens, dtype=np.int32),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            versions=np.asarray(self.versions, dtype=np.int32),
            finish_reason=reason,
            text=self.vocabulary.text(self.tokens, stop),
        )

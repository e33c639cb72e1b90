"""What a rollout needs of an inference engine. `embedded` is one implementation, others go beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shared.config import Sampling
from shared.errors import DataError
from shared.group import FinishReason
from shared.snapshot import Layout


@dataclass(frozen=True, slots=True)
class Request:
    """n samples of one prompt. `seed` makes them reproducible whatever else is decoded beside them.

    priority: of those that wait for a place the smallest goes first, and among equals the first that came.
    """

    request_id: str
    prompt_tokens: list[int]
    n: int
    sampling: Sampling
    seed: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer.

    tokens: [T] int32, the end token included where the policy produced it; logprobs: [T] float32, of the distribution
    sampled from (temperature, top-p and top-k applied); versions: [T] int32, policy version of each token;
    text: decoded, without special tokens and cut before a stop string.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    text: str


@dataclass(frozen=True, slots=True)
class Slot:
    """Where weights lie in shared memory, for engines that compute in processes of their own (shared/snapshot.py)."""

    file: str
    number: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Weights:
    """A complete set of weights, ready to be used in place.

    tensors: parameter name to torch tensor, in the engine's dtype; they are views on memory that stays valid until
    the engine has been given newer ones. slot: where they lie, None where they are in this process alone.
    """

    lineage: int
    version: int
    tensors: dict[str, Any]
    slot: Slot | None = None


def check_prompt(request: Request, max_context: int, vocabulary_size: int) -> None:
    """Raises DataError where the prompt leaves no room in the context, or holds ids that the model does not know."""
    length, limit = len(request.prompt_tokens), max_context - 1
    if not 1 <= length <= limit:
        raise DataError(
            f"the prompt of {request.request_id} has {length} tokens; there must be at least 1 and, to leave room "
            f"for an answer, at most {limit} (rollout.max_context - 1): shorten it or raise rollout.max_context"
        )
    check_tokens(request.prompt_tokens, vocabulary_size, f"the prompt of {request.request_id}")


def check_tokens(tokens: list[int], vocabulary_size: int, what: str) -> None:
    """Raises DataError where `what` holds token ids that the model does not know."""
    if not 0 <= min(tokens) <= max(tokens) < vocabulary_size:
        raise DataError(
            f"{what} has token ids outside of the model's vocabulary of {vocabulary_size}: wrong tokenizer?"
        )


class Engine(Protocol):
    """An inference engine. All methods are called from the service's event loop.

    tokenizer: of transformers. end_tokens: ids that end a sample.
    """

    tokenizer: Any
    end_tokens: set[int]

    @property
    def version(self) -> int:
        """Policy version of the weights it holds; -1 before the first swap."""

    async def generate(self, request: Request) -> list[Sample]:
        """The n samples of a request. Any number of requests may be in flight.

        Raises DataError where the prompt leaves no room in the context, EngineFailed after `close` or a failure.
        """

    async def abort(self, request_id: str) -> None:
        """End the samples of a request; its `generate` returns what there is, with FinishReason.ABORTED."""

    async def swap(self, weights: Weights) -> float:
        """Use new weights from the next decoding step on, keeping every sample in flight. Returns the pause in s."""

    async def score(self, tokens: list[int]) -> np.ndarray:
        """[T-1] float32 log-probs of tokens[1:] under the current weights at temperature 1.

        [C, T-1] where there are C copies of the model, one row each.
        """

    async def failed(self) -> None:
        """Raises EngineFailed once the engine generates no more; does not return before."""

    def stats(self) -> dict[str, float]:
        """Figures by name: samples in flight and waiting; tokens, samples and busy seconds since the start."""

    async def close(self) -> None:
        """Stop; requests in flight end with an error."""

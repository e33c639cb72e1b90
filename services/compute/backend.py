"""What the learner needs of a model: the one place that knows how it is built, computed, sharded and stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from services.compute.packing import PackedRows


class Backend(Protocol):
    """A policy with float32 master weights and compute weights in a dtype of its own.

    parameters: float32 master weights by name, what the optimizer works on.
    """

    parameters: dict[str, torch.Tensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights of a snapshot, by name; where an adapter is trained these are not the masters."""

    def logprobs(self, rows: PackedRows, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the samples' tokens and entropies there, [K] float32 on the CPU each, with gradient."""

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """A forward and backward pass follows; is_last: the last one before the optimizer's step."""

    def collect_gradients(self) -> None:
        """Add the gradients of the compute weights to those of the masters, and clear them."""

    def discard_gradients(self) -> None:
        """Forget those of the compute weights, of a backward pass that failed."""

    def write_snapshot(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Cast the policy's weights into the tensors of a snapshot."""

    def use_snapshot(self, tensors: Mapping[str, torch.Tensor] | None) -> None:
        """Compute with these tensors from now on, without a copy where the dtype is that of the compute weights.

        Without tensors the backend casts into weights of its own.
        """

    def score(self, tokens: list[int]) -> np.ndarray:
        """[T-1] float32 log-probs of tokens[1:] at temperature 1."""

    def probe_tokens(self, length: int) -> list[int]:
        """Token ids of a fixed text, `length` of them."""

    def capture(self) -> Callable[[Path], None]:
        """Copy the masters; what comes back writes the copy to a folder, at any time and in any thread.

        It is a Hugging Face folder, or a peft folder where an adapter is trained; tokenizer included.
        """

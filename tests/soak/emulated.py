"""Stands in for `python -m stretto` in soak.py: `emulated.py serve SERVICE …` runs a service without a model.

Everything is the real thing but the policy, which is a table: the log-prob of a token is its entry, whatever came
before it. The engine draws tokens at random, the learner trains the table.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from services.rollout.engine import Request, Sample, Weights
from shared.config import RunConfig
from shared.errors import DataError, StrettoError
from shared.group import FinishReason
from stretto.cli import main


class EmulatedEngine:
    """An `Engine` (services/rollout/engine.py) that answers at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end_tokens = {tokenizer.eos_token_id}
        self.version = -1
        self._table = np.zeros(0, dtype="f4")
        self._samples = self._tokens = 0

    @classmethod
    def load(cls, config: RunConfig) -> EmulatedEngine:
        from services.rollout.vocabulary import load_tokenizer

        return cls(load_tokenizer(config.model))

    async def generate(self, request: Request) -> list[Sample]:
        if self.version < 0:
            raise StrettoError("swap first")
        draw = np.random.default_rng(request.seed)
        lengths = draw.integers(1, request.sampling.max_tokens + 1, size=request.n)
        samples = [self._sample(draw.integers(0, len(self._table), length, dtype="i4")) for length in lengths]
        self._samples += len(samples)
        self._tokens += int(lengths.sum())
        return samples

    def _sample(self, tokens: np.ndarray) -> Sample:
        versions = np.full(len(tokens), self.version, dtype="i4")
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return Sample(tokens, self._table[tokens], versions, FinishReason.STOP, text)

    async def abort(self, request_id: str) -> None:
        raise AssertionError("nothing is ever in flight")

    async def swap(self, weights: Weights) -> float:
        self._table, self.version = weights.tensors["table"].numpy(), weights.version
        return 0.0

    async def score(self, tokens: list[int]) -> np.ndarray:
        return self._table[tokens[1:]]

    async def failed(self) -> None:
        await asyncio.Event().wait()

    def stats(self) -> dict[str, float]:
        return {"samples": float(self._samples), "tokens": float(self._tokens)}

    async def close(self) -> None:
        pass


def emulated_trainer(config: RunConfig, total_steps: int, checkpoint: Path | None, crew: Any = None) -> Any:
    """The real trainer, with a backend whose model is the table."""
    import torch

    from services.learner.trainer import Trainer
    from services.rollout.vocabulary import load_tokenizer
    from shared.algorithms import load_algorithm

    class TableBackend:
        """A `Backend` (services/compute/backend.py)."""

        def __init__(self, vocabulary: int) -> None:
            self.parameters = {"table": torch.full((vocabulary,), -math.log(vocabulary))}
            self._weights = torch.zeros(0)

        @property
        def shapes(self) -> dict[str, tuple[int, ...]]:
            return {"table": tuple(self.parameters["table"].shape)}

        def logprobs(self, rows: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
            return self._weights[torch.from_numpy(rows.target)], torch.zeros(len(rows.target))

        def begin_micro_batch(self, *, is_last: bool) -> None:
            pass

        def collect_gradients(self) -> None:
            master = self.parameters["table"]
            master.grad = self._weights.grad if master.grad is None else master.grad + self._weights.grad
            self._weights.grad = None

        def discard_gradients(self) -> None:
            self._weights.grad = None

        def write_snapshot(self, tensors: Mapping[str, torch.Tensor]) -> None:
            tensors["table"].copy_(self.parameters["table"])

        def use_snapshot(self, tensors: Mapping[str, torch.Tensor]) -> None:
            self._weights = tensors["table"].detach().requires_grad_()

        def score(self, tokens: list[int]) -> np.ndarray:
            return self._weights.detach()[tokens[1:]].numpy()

        def probe_tokens(self, length: int) -> list[int]:
            return list(range(length))

        def capture(self) -> Callable[[Path], None]:
            table = self.parameters["table"].clone()
            return lambda folder: torch.save({"table": table}, folder / "table.pt")

    if checkpoint is not None:
        raise DataError(f"an emulated run begins anew: {checkpoint} is not read")
    backend = TableBackend(len(load_tokenizer(config.model)))
    return Trainer(config, backend, load_algorithm(config.algorithm), total_steps=total_steps)


def emulate(service: str) -> None:
    """Have a service find these where it looks for the model."""
    if service == "rollout":
        import services.rollout.service

        services.rollout.service.load_engine = EmulatedEngine.load
    elif service == "learner":
        import services.learner.service

        services.learner.service.load_trainer = emulated_trainer


if __name__ == "__main__":
    emulate(sys.argv[2])
    main()

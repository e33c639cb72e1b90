"""One update of a critic: the value loss on what the learner trains on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from services.compute.hf import HFCritic
from services.compute.inference import as_batch
from services.compute.memory import Room
from services.compute.optimizer import Optimizer
from services.compute.packing import PackedRows, Row, micro_batches, pack
from shared.algorithms.losses import value_loss
from shared.config import Critic, RunConfig
from shared.errors import StrettoError
from shared.group import Columns


class CriticTrainer:
    """Updates a critic. version: of the policy that it has learned beside; state: nothing beyond the weights."""

    def __init__(self, config: RunConfig, settings: Critic, backend: HFCritic, room: Room, *, total_steps: int) -> None:
        self.config = config
        self.backend = backend
        self.settings = settings
        self._room = room
        self.optimizer = Optimizer(backend.parameters, settings, total_steps)
        self.version = 0
        self.state: dict[str, float] = {}

    def values(self, rows: PackedRows) -> torch.Tensor:
        """[K] float32 value of the state before each token."""
        return self.backend.values(rows)

    def learn(self, lessons: Sequence[Columns]) -> dict[str, float]:
        """One update; returns its metrics. Version and schedule go up by one.

        lessons: of each group `prompt_tokens`, `tokens`, `tokens_offsets`, `loss_mask`, `values` (from before) and
        `returns`. The loss is the mean over all tokens that count. Raises StrettoError where it is not finite.
        """
        sums = {"loss": 0.0, "clip_fraction": 0.0, "value/mean": 0.0, "return/mean": 0.0}
        norm, tokens = 0.0, 0
        parts = min(self.settings.updates, len(lessons))
        for number in range(parts):
            if number > 0:
                self.backend.use_snapshot(None)
            part = lessons[number::parts]
            counted = sum(int(columns["loss_mask"].sum()) for columns in part)
            tokens += counted
            batches = [as_batch(str(i), columns, "values", "returns") for i, columns in enumerate(part)]
            for rows in micro_batches(batches, self._room.max_tokens):
                for measured in self._room.compute(
                    rows, partial(self._micro_batch, counted), self.backend.discard_gradients
                ):
                    sums = {name: total + found for (name, total), found in zip(sums.items(), measured, strict=True)}
            with self._room.during("the optimizer's step"):
                norm += float(self.optimizer.step()) / parts
        self.optimizer.advance()
        self.backend.use_snapshot(None)
        self.version += 1
        metrics = {name: value / max(tokens, 1) for name, value in sums.items()} | {"grad_norm": norm}
        if not math.isfinite(metrics["loss"] + norm):
            raise StrettoError(
                f"the critic's loss of version {self.version} is {metrics['loss']} and its gradient norm {norm}: lower "
                "critic.lr, or resume from the last checkpoint"
            )
        return metrics | {"lr": self.optimizer.lr}

    def _micro_batch(self, counted: int, rows: list[Row]) -> list[float]:
        """Add to the gradients; returns the sums of what is measured, in the order of `learn`. counted: of the step."""
        packed = pack(rows)
        mask = torch.from_numpy(packed.mask)
        old, returns = (torch.from_numpy(packed.columns[name])[mask] for name in ("values", "returns"))
        values = self.backend.values(packed)[mask]
        losses, clipped = value_loss(values, old, returns, self.settings.clip_value)
        measured = [float(found.sum()) for found in (losses.detach(), clipped, values.detach(), returns)]
        (losses.sum() / max(counted, 1)).backward()  # type: ignore[no-untyped-call]
        with self._room.during("the sum of the gradients"):
            self.backend.collect_gradients()
        return measured

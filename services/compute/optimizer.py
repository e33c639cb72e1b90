"""AdamW on the master weights with a learning-rate schedule and clipped gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from shared.config import Training


class Optimizer:
    """Steps the float32 masters. Its state can be taken out and put back by name (checkpoint.py).

    total_steps: where the schedule ends. steps: schedule steps taken, those without a gradient included.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], training: Training, total_steps: int) -> None:
        self._parameters = parameters
        self._training = training
        self._total_steps = total_steps
        self.steps = 0
        self.adamw = torch.optim.AdamW(
            list(parameters.values()),
            lr=training.lr,
            betas=training.betas,
            eps=training.eps,
            weight_decay=training.weight_decay,
            fused=True,
        )

    def step(self) -> torch.Tensor:
        """Clip, step, and clear the gradients; returns the gradient norm before clipping, a scalar tensor."""
        limit = math.inf if self._training.clip_norm is None else self._training.clip_norm
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), limit, foreach=True)
        self.adamw.param_groups[0]["lr"] = self.lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return gathered(norm)

    def advance(self) -> None:
        """Move the schedule on by one update."""
        self.steps += 1

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._training.lr * schedule(self._training, self.steps, self._total_steps)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which this rank may have a shard. All ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor, on the CPU; [0] on ranks other than 0, which take part and keep nothing."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    whole = gathered(tensor.detach())
    return whole.cpu().contiguous() if dist.get_rank() == 0 else torch.empty(0)


def sharded_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor that it has all of, cut as `other` is and where that is."""
    tensor = tensor.to(other.device)
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements)


def schedule(training: Training, step: int, total_steps: int) -> float:
    """Share of the highest learning rate at a step, counted from 0: a linear warm-up, then the schedule down to 0."""
    if step < training.warmup_steps:
        return (step + 1) / training.warmup_steps
    done = (step - training.warmup_steps) / max(total_steps - training.warmup_steps, 1)
    match training.schedule:
        case "linear":
            return max(1.0 - done, 0.0)
        case "cosine":
            return (1.0 + math.cos(math.pi * min(done, 1.0))) / 2
        case _:
            return 1.0

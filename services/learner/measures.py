"""What is measured of an update, as sums over its micro-batches that become means over its tokens. For trainer.py."""

from __future__ import annotations

import numpy as np
import torch

from services.compute.packing import PackedRows
from shared.algorithms.losses import kl_k3


@torch.no_grad()
def fresh_drift(packed: PackedRows, logprobs: torch.Tensor, lag: int) -> dict[str, torch.Tensor]:
    """Sums of |learner − engine|, k3 and the lag, and the largest distance, on samples of this lag; {} without any.

    A whole sample counts by the version it began with: the engine keeps keys and values over a swap, so that a token
    sampled by the learner's own version after older ones is none that the learner would compute alike.
    """
    behavior = packed.columns["behavior_logprobs"]
    chosen = torch.from_numpy(packed.mask & (packed.lag == lag) & np.isfinite(behavior))
    if not chosen.any():
        return {}
    new, old = logprobs[chosen], torch.from_numpy(behavior)[chosen]
    distance = (new - old).abs()
    return {
        "drift/fresh/tokens": chosen.sum(),
        "drift/fresh/lag": lag * chosen.sum(),
        "drift/fresh/mean": distance.sum(),
        "drift/fresh/max": distance.max(),
        "drift/fresh/k3": kl_k3(old, new).sum(),
    }


def add(sums: dict[str, torch.Tensor], measures: dict[str, torch.Tensor]) -> None:
    """Add up over micro-batches; a `…/max` keeps the largest."""
    for name, value in measures.items():
        if name not in sums:
            sums[name] = value
        elif name.endswith("/max"):
            sums[name] = torch.maximum(sums[name], value)
        else:
            sums[name] = sums[name] + value


def means(sums: dict[str, torch.Tensor]) -> dict[str, float]:
    """Means over the tokens that were trained, or over the freshest; the loss, counts and maxima as they are."""
    values = {name: float(value) for name, value in sums.items()}
    tokens = values.pop("tokens", 0.0)
    for name in values.keys() - {"loss", "drift/missing", "drift/fresh/tokens"}:
        if not name.endswith("/max"):
            values[name] /= max(values["drift/fresh/tokens"] if name.startswith("drift/fresh/") else tokens, 1.0)
    return {"loss": 0.0} | values

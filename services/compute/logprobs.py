"""Log-probs and entropies from logits with few passes over them: they are the largest tensor of a step.

K tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax at the target and the entropy, their gradients written down directly.

    g · (one-hot − p) / temperature, and −h · p · (log p + H) / temperature. Autograd would make and keep five [K, V]
    float32 tensors; this keeps p alone, in the dtype of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
        highest = scaled.amax(-1, keepdim=True)
        p = (scaled - highest).exp_()
        total = p.sum(-1, keepdim=True)
        p /= total
        norm = (highest + total.log())[:, 0]
        logprobs = scaled.gather(-1, target[:, None])[:, 0] - norm
        entropy = norm - torch.linalg.vecdot(p, scaled)
        ctx.save_for_backward(p.to(logits.dtype), target, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        p, target, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        total: torch.Tensor | None = None
        if of_logprobs is not None:
            g = (of_logprobs / ctx.temperature)[:, None].to(p.dtype)
            total = (p * -g).scatter_add_(-1, target[:, None], g)
        if of_entropy is not None:
            h = (of_entropy / ctx.temperature)[:, None]
            surprise = p.float().clamp_min(torch.finfo(torch.float32).tiny).log_() + entropy[:, None]
            part = (-h * p * surprise).to(p.dtype)
            total = part if total is None else total + part
        return total, None, None


def token_logprobs(logits: torch.Tensor, target: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target ([K] float32) and the entropy there ([K] float32), both with gradient.

    logits: [K, V] in any float dtype; target: [K] int64; temperature: what the logits are divided by.
    """
    logprobs, entropy = _TokenLogprobs.apply(logits, target, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropy

"""The engine's attention, under a name that transformers models can be loaded with, and the pass that reads prompts.

A forward pass of the engine is one flat row of tokens, [1, N], of any number of samples: no padding in any matmul
outside of attention. Which token attends to what is known to the `attend` that is handed through the model.
Letters: N tokens of the pass, H query heads, K key/value heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from shared.errors import DataError

ATTENTION = "stretto"

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""(layer, query [1, H, N, D], key [1, K, N, D], value [1, K, N, D], scale) -> [1, N, H, D]; rotary already applied."""

Store = Callable[[int, int, Tensor, Tensor], None]
"""(number of the prompt in the pass, layer, keys [K, P, D], values [K, P, D])."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    *,
    attend: Attend,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    for feature in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(feature) is not None:
            raise DataError(f"the embedded engine has no attention with {feature}; use a model without it")
    assert isinstance(module.layer_idx, int)
    return attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attention)


class PromptPass:
    """Causal attention of several prompts, one after the other in the pass, which do not see each other.

    lengths: tokens of each prompt; store: gets the K/V of each prompt and layer.
    """

    def __init__(self, lengths: list[int], store: Store | None = None) -> None:
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + length)
        self._spans = [slice(start, end) for start, end in pairwise(ends)]
        self._store = store

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """An `Attend`."""
        parts = []
        for number, span in enumerate(self._spans):
            q, k, v = query[:, :, span], key[:, :, span], value[:, :, span]
            parts.append(
                nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            )
            if self._store:
                self._store(number, layer, k[0], v[0])
        return torch.cat(parts, dim=2).transpose(1, 2)

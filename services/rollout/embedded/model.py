"""Loads a model for the embedded engine."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from services.rollout.embedded.attention import ATTENTION, PromptPass
from shared.errors import DataError


def load_model(folder: str, dtype: str) -> Any:
    """A causal language model with the engine's attention, weights in `dtype`, buffers as the model wants them.

    Raises DataError where it cannot be loaded, or does not run on the engine's attention.
    """
    try:
        # dtype= and not .to(): that would also cast the rotary frequencies, and positions would drift.
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=ATTENTION
        )
    except (OSError, ValueError) as error:
        raise DataError(f"cannot load the model {folder}: {error}") from error
    model.eval().requires_grad_(False)
    _check(model, folder)
    return model


@torch.inference_mode()
def _check(model: Any, folder: str) -> None:
    """Raise DataError where not every layer of the model attends the engine's way."""
    seen: set[int] = set()
    prompt = PromptPass([1], lambda number, layer, keys, values: seen.add(layer))
    model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False, attend=prompt.attend)
    layers = model.config.get_text_config().num_hidden_layers
    if seen != set(range(layers)):
        raise DataError(
            f"the model {folder} ({type(model).__name__}) used the engine's attention in {len(seen)} of {layers} "
            "layers: it is of a kind that the embedded engine cannot run"
        )

"""Runs a sequence classifier by transformers, its weights as float32, bfloat16, float16 or int8. For model.py.

Letters: B samples of a batch, L labels of the model, T tokens of the longest sample.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from services.reward.signals import Encoded
from shared.config import Signal
from shared.errors import ConfigError


class TorchClassifier:
    """A model on the GPU, where there is one."""

    def __init__(self, model_name: str, signal: Signal) -> None:
        """Raises ConfigError where the model was not trained to classify, and whatever transformers does."""
        from transformers import AutoModelForSequenceClassification
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        dtype = torch.float32 if signal.dtype == "int8" else getattr(torch, signal.dtype)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            model_name, dtype=dtype, output_loading_info=True
        )
        if missing := sorted(found["missing_keys"]):
            raise ConfigError(f"signal {signal.name}: {model_name} is no sequence classifier: it has no {missing[0]}")
        if signal.dtype == "int8":
            to_int8(model)
        ctypes.CDLL(None).malloc_trim(0)  # glibc would keep the memory of the tensors that others took the place of
        self._model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        self._pad: int | None = self._model.config.pad_token_id

    @torch.inference_mode()
    def logits(self, batch: list[Encoded]) -> list[list[float]]:
        """[B][L] raw logits, float32."""
        if self._pad is None and len(batch) > 1:  # the model could not tell where a sample ends
            return [row for encoded in batch for row in self.logits([encoded])]
        ids = [torch.tensor(encoded["input_ids"]) for encoded in batch]
        inputs = {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self._pad or 0),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        }  # [B, T] int64 each
        if "token_type_ids" in batch[0]:
            types = [torch.tensor(encoded["token_type_ids"]) for encoded in batch]
            inputs["token_type_ids"] = pad_sequence(types, batch_first=True)
        moved = {name: tensor.to(self._model.device) for name, tensor in inputs.items()}
        rows: list[list[float]] = self._model(**moved).logits.float().tolist()
        return rows


def to_int8(model: Any) -> None:
    """Keep the weights of a model's linear layers and embeddings as int8, in place; its head stays as it is.

    Symmetric, one scale a row; activations keep their dtype.
    """
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis

    config = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    quantize_(
        model.base_model, config, filter_fn=lambda layer, _: isinstance(layer, torch.nn.Linear | torch.nn.Embedding)
    )
    for parameter in model.parameters():
        if type(parameter.data) is torch.Tensor:  # it lies in the mapped file, all of which would stay in memory
            parameter.data = parameter.data.clone()

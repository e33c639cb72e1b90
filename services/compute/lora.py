"""LoRA: what is trained is a small adapter (peft) beside the linear layers of a model, whose weights stay as they are.

Letters: I, O features in and out of a layer; r the rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from services.compute.optimizer import gathered
from shared.config import LoRA
from shared.errors import ConfigError, DataError

ADAPTER_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_A, _B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."


class Adapter:
    """The adapter in a model. shapes: those of the model's own weights, by the names that they have without it.

    Its weights are float32 and carry gradients, those of the model carry none. There is no dropout, as in all training.
    """

    def __init__(self, model: Any, lora: LoRA, base: str, folder: Path | None = None) -> None:
        """Put it into `model`, which is changed; new (it changes nothing yet), or as it is in a peft folder.

        base: name or folder of the model, which the folder's must be. Raises ConfigError where the target modules are
        none that an adapter can be at, DataError where the folder does not hold this adapter.
        """
        try:
            from peft import LoraConfig, PeftModel
            from peft.tuners.lora import Linear, LoraLayer
        except ImportError:
            raise ConfigError("learner.lora needs peft: pip install 'stretto[lora]'") from None
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        targets: Any = lora.target_modules
        wanted = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            target_modules=targets if isinstance(targets, str) else list(targets),
            base_model_name_or_path=base,
            task_type="CAUSAL_LM",
        )
        try:
            self._peft: Any = PeftModel(model, wanted)
        except ValueError as error:
            raise ConfigError(f"learner.lora.target_modules: {str(error).splitlines()[0]}") from None
        self._scaling = lora.alpha / lora.rank
        layers: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
        tied = {id(model.get_input_embeddings().weight)}
        for name, layer in layers.items():
            if not isinstance(layer, Linear) or id(layer.get_base_layer().weight) in tied:
                raise ConfigError(f"learner.lora.target_modules: {name} is no linear layer with weights of its own")
        self._turned = {name for name, layer in layers.items() if layer.fan_in_fan_out}
        if folder is not None:
            self._load(folder, base, lora)

    def _load(self, folder: Path, base: str, lora: LoRA) -> None:
        from peft import set_peft_model_state_dict
        from peft.utils import load_peft_weights

        try:
            told = json.loads((folder / ADAPTER_FILE).read_text())
            found = (told["base_model_name_or_path"], told["r"], told["lora_alpha"])
            if found != (base, lora.rank, lora.alpha):
                raise DataError(
                    f"the adapter in {folder} is one to {found[0]}, of rank {found[1]} and alpha {found[2]}; the run's "
                    f"is one to {base}, of rank {lora.rank} and alpha {lora.alpha}"
                )
            result: Any = set_peft_model_state_dict(self._peft, load_peft_weights(str(folder), device="cpu"))
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise DataError(f"the adapter in {folder} cannot be read: {str(error).splitlines()[0]}") from None
        lacking = [name for name in result.missing_keys if ".lora_" in name]
        if lacking or result.unexpected_keys:
            raise DataError(
                f"the adapter in {folder} is at other layers than learner.lora.target_modules: "
                f"{[*lacking, *result.unexpected_keys][0]}"
            )

    def merged(self, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's weights with the adapter's share in them, whole, by the names in `shapes`, one by one.

        weights: the parameters of the model, of which ranks may have a shard; all ranks call it then.
        """
        for name, weight in weights.items():
            if ".lora_" in name:
                continue
            layer, is_target, attribute = name.partition(_BASE)
            whole = gathered(weight)
            if is_target and attribute == "weight":
                share = gathered(weights[layer + _B]) @ gathered(weights[layer + _A])  # [O, I]: [O, r] @ [r, I]
                whole = whole.float() + (share.T if layer in self._turned else share) * self._scaling
            yield f"{layer}.{attribute}" if is_target else name, whole

    def save(self, folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
        """Write these weights of it, and its settings, as a peft folder."""
        tensors = {
            f"base_model.model.{name.replace('.default.', '.')}": weight.contiguous()
            for name, weight in weights.items()
        }
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        self._peft.peft_config["default"].save_pretrained(folder)


def merge(checkpoint: Path, folder: Path) -> None:
    """Write the model of a peft folder, the adapter merged into it, as a Hugging Face folder in float32.

    Raises DataError where the adapter or the model that it belongs to cannot be loaded.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        base = json.loads((checkpoint / ADAPTER_FILE).read_text())["base_model_name_or_path"]
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        PeftModel.from_pretrained(model, str(checkpoint)).merge_and_unload().save_pretrained(folder)
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataError(f"cannot merge the adapter in {checkpoint}: {str(error).splitlines()[0]}") from None

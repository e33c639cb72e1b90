"""Hugging Face models as they are, for one process: the policy that is trained, the reference, and critics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer

from services.compute.device import compute_device, wait_for
from services.compute.logprobs import token_logprobs
from services.compute.lora import Adapter
from services.compute.optimizer import copied, gathered
from services.compute.packing import PackedRows
from shared.config import Learner, Training
from shared.errors import DataError

LOGIT_CHUNK = 1024
"""Positions whose logits exist at once: [LOGIT_CHUNK, vocabulary] float32 is the largest tensor of a step."""

EAGER_SCORES = 1 << 18
"""[R, S, S] attention scores up to which plain attention is used: on CPU it is three times faster for short rows."""

LOGITS_TOLERANCE = 0.1
"""Log-prob difference, well above rounding, between the model's own logits and those that the learner computes."""

PROBE_TEXT = (
    "Weights flow one way: from the learner, which trains them, to the rollouts, which generate with them. "
    "This sentence is scored by both sides, and both must get the same numbers. "
)


class HFModel:
    """A model with float32 masters and compute weights in a dtype of its own; or frozen, with compute weights alone.

    parameters: as of backend.Backend; none where it is frozen.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        training: Training | None,
        *,
        dtype: str = "float32",
        adapter: Adapter | None = None,
    ) -> None:
        """model: in float32, its weights become the masters; with `training` None in `dtype`, and frozen.

        adapter: the one in the model, whose weights are the masters then; those of the model are in the compute dtype.
        """
        self._model = model.eval()  # without dropout: with it, learner and engine would be different policies
        self._tokenizer = tokenizer
        self._adapter = adapter
        self._device: torch.device = next(model.parameters()).device
        self._weights = dict(model.named_parameters())
        self._dtype: torch.dtype = getattr(torch, dtype if training is None else training.dtype)
        self._owners = {name: _owner(model, name) for name, _ in model.named_parameters()}
        self._tied = _tied_places(model, self._owners)
        self.parameters: dict[str, torch.Tensor] = {}
        if training is None:
            return
        self.parameters = {n: p.detach().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
        self.use_snapshot(None)
        if training.gradient_checkpointing:
            checkpoint_gradients(model)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the weights of a snapshot, by name."""
        if self._adapter is not None:
            return self._adapter.shapes
        return {name: tuple(master.shape) for name, master in self.parameters.items()}

    def hidden(self, rows: PackedRows) -> torch.Tensor:
        """[K, D] hidden states of the tokens that predict those of the samples, in the compute dtype."""
        n_rows, width = rows.ids.shape
        is_plain = self._device.type == "cpu" and n_rows * width**2 <= EAGER_SCORES
        self._model.set_attn_implementation("eager" if is_plain else "sdpa")
        mask = self._here(rows.attention())[:, None]
        bias = torch.zeros(mask.shape, dtype=self._dtype, device=self._device)
        hidden: torch.Tensor = self._model.base_model(
            input_ids=self._here(rows.ids),
            position_ids=self._here(rows.positions),
            attention_mask=bias.masked_fill_(~mask, torch.finfo(self._dtype).min),
            use_cache=False,
        ).last_hidden_state
        return hidden.reshape(-1, hidden.shape[-1])[self._here(rows.source)]

    def _here(self, array: np.ndarray) -> torch.Tensor:
        """An array where the model is."""
        return torch.from_numpy(array).to(self._device)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Nothing to do: there are no ranks to wait for."""

    def collect_gradients(self) -> None:
        """Add the gradients of the compute weights to those of the masters, and clear them."""
        for name, master in self.parameters.items():
            module, attribute = self._owners[name]
            weight = module._parameters[attribute]
            if weight is None or weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad += weight.grad
            weight.grad = None
        wait_for(self._device)

    def discard_gradients(self) -> None:
        """Forget the gradients of the compute weights."""
        for module, attribute in self._owners.values():
            weight = module._parameters[attribute]
            if weight is not None:
                weight.grad = None

    def use_snapshot(self, tensors: Mapping[str, torch.Tensor] | None) -> None:
        """Compute with these tensors from now on; without a copy where the dtype is that of the compute weights."""
        if self._adapter is not None:
            tensors = {name: master.detach() for name, master in self.parameters.items()}  # float32 as the masters are
        elif tensors is None or any((t.dtype, t.device) != (self._dtype, self._device) for t in tensors.values()):
            # Parameters are cast one by one: `model.to(bfloat16)` would cast the rotary frequencies too.
            tensors = {name: master.detach().to(self._dtype, copy=True) for name, master in self.parameters.items()}
        for name in self.parameters:
            module, attribute = self._owners[name]
            module._parameters[attribute] = torch.nn.Parameter(tensors[name])
        for (module, attribute), name in self._tied:
            owner, owner_attribute = self._owners[name]
            module._parameters[attribute] = owner._parameters[owner_attribute]

    def capture(self) -> Callable[[Path], None]:
        """Copy the masters; see backend.Backend."""
        return partial(self._write, {name: copied(master) for name, master in self.parameters.items()})

    def _write(self, weights: dict[str, torch.Tensor], folder: Path) -> None:
        if self._adapter is not None:
            self._adapter.save(folder, weights)
        else:
            self._model.save_pretrained(folder, state_dict=weights)
        self._tokenizer.save_pretrained(folder)


class HFBackend(HFModel):
    """A causal LM; see backend.Backend."""

    @classmethod
    def load(
        cls, folder: str, training: Training, *, tokenizer: str | None = None, adapter: Path | None = None
    ) -> HFBackend:
        """The model in `folder` (or of that name), to be trained; adapter: where the adapter of it is, if not new.

        Raises DataError where model, tokenizer or adapter cannot be loaded, or the model makes more of its hidden
        states than the learner knows; ConfigError where it cannot have the adapter that is asked for.
        """
        lora = training.lora if isinstance(training, Learner) else None
        model, words, _ = load_model(
            AutoModelForCausalLM, folder, tokenizer, "float32" if lora is None else training.dtype
        )
        if lora is None:
            backend = cls(model, words, training)
        else:
            backend = cls(model, words, training, adapter=Adapter(model, lora, folder, adapter))
        backend.check(folder)
        return backend

    @classmethod
    def frozen(cls, folder: str, dtype: str, *, tokenizer: str | None = None) -> HFBackend:
        """The same, for its log-probs alone: without masters."""
        backend = cls(*load_model(AutoModelForCausalLM, folder, tokenizer, dtype)[:2], None, dtype=dtype)
        backend.check(folder)
        return backend

    @torch.no_grad()
    def check(self, folder: str) -> None:
        """Raise DataError where the model makes more of its hidden states than `_chunk_logprobs` does."""
        tokens = self.probe_tokens(8)
        ids = torch.tensor([tokens], device=self._device)
        theirs, _ = token_logprobs(self._model(input_ids=ids, use_cache=False).logits[0, :-1], ids[0, 1:], 1.0)
        difference = float((torch.from_numpy(self.score(tokens)) - theirs.cpu()).abs().max())
        if not difference <= LOGITS_TOLERANCE:
            raise DataError(
                f"the model {folder} ({type(self._model).__name__}) gives other log-probs than its lm_head alone, by "
                f"{difference:.3g}: it scales its logits in a way that the learner does not know, or its weights are "
                "not finite. Train another model"
            )

    def logprobs(self, rows: PackedRows, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the samples' tokens and entropies there, [K] float32 on the CPU each, with gradient."""
        logprobs, entropy = self._token_logprobs(self.hidden(rows), self._here(rows.target), temperature)
        return logprobs.cpu(), entropy.cpu()  # what comes after is small: losses know no devices

    def _token_logprobs(
        self, hidden: torch.Tensor, target: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies at [K, D] hidden states, the logits of a chunk recomputed in the backward pass."""
        if len(hidden) <= LOGIT_CHUNK:
            return self._chunk_logprobs(hidden, target, temperature)
        parts = [
            checkpoint(self._chunk_logprobs, h, t, temperature, use_reentrant=False)
            for h, t in zip(torch.split(hidden, LOGIT_CHUNK), torch.split(target, LOGIT_CHUNK), strict=True)
        ]
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])

    def _chunk_logprobs(
        self, hidden: torch.Tensor, target: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._model.lm_head(hidden)
        softcap: float | None = getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return token_logprobs(logits, target, temperature)

    @torch.no_grad()
    def write_snapshot(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Cast the policy's weights into the tensors of a snapshot."""
        for name, weight in self._whole():
            if tensors:
                tensors[name].copy_(weight)

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's weights by the names of a snapshot, one by one."""
        if self._adapter is not None:
            return self._adapter.merged(self._weights)
        return ((name, gathered(master)) for name, master in self.parameters.items())

    @torch.no_grad()
    def score(self, tokens: list[int]) -> np.ndarray:
        """[T-1] float32 log-probs of tokens[1:] at temperature 1."""
        ids = torch.tensor([tokens], device=self._device)
        self._model.set_attn_implementation("sdpa")  # as the engine scores: in bfloat16 another kernel rounds otherwise
        hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
        return self._chunk_logprobs(hidden, ids[0, 1:], 1.0)[0].cpu().numpy()

    def probe_tokens(self, length: int) -> list[int]:
        """Token ids of a fixed text, `length` of them."""
        ids: list[int] = self._tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
        return (ids * (length // len(ids) + 1))[:length]


class HFCritic(HFModel):
    """A value model: any backbone with a head of one output (a token classifier with one label)."""

    @classmethod
    def load(cls, folder: str, training: Training, *, tokenizer: str | None = None) -> HFCritic:
        """The model in `folder` (or of that name). The head of a reward model is kept; a new one is 0 for all states.

        Raises DataError where it cannot be loaded.
        """
        model, words, missing = load_model(AutoModelForTokenClassification, folder, tokenizer, "float32", num_labels=1)
        critic = cls(model, words, training)
        for name in missing & {"score.weight", "score.bias", "classifier.weight", "classifier.bias"}:
            torch.nn.init.zeros_(critic.parameters[name])
        critic.use_snapshot(None)
        return critic

    def values(self, rows: PackedRows) -> torch.Tensor:
        """[K] float32 value, on the CPU, of the state before each token of the samples, with gradient."""
        head = self._model.score if hasattr(self._model, "score") else self._model.classifier
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(self.hidden(rows).float(), head.weight.float(), bias)[:, 0].cpu()


def load_model(kind: Any, folder: str, tokenizer: str | None, dtype: str, **changes: Any) -> tuple[Any, Any, set[str]]:
    """Model, on the GPU of this process if it has one, tokenizer, and names of parameters that the files lack.

    Raises DataError.
    """
    try:
        model, found = kind.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", output_loading_info=True, **changes
        )
        words = AutoTokenizer.from_pretrained(tokenizer or folder)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot load the model {folder}: {str(error).splitlines()[0]}") from None
    return model.to(compute_device()), words, set(found["missing_keys"])


def _owner(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module and attribute where the parameter `name` lives."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def checkpoint_gradients(model: Any) -> None:
    """Recompute each layer in the backward pass. A layer does so in training mode only; what is in it stays in eval."""
    model.gradient_checkpointing_enable()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def _tied_places(
    model: torch.nn.Module, owners: Mapping[str, tuple[torch.nn.Module, str]]
) -> list[tuple[tuple[torch.nn.Module, str], str]]:
    """Places that hold a parameter which lives elsewhere too, with the name it goes by (a tied lm_head)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places = [
        ((module, attribute), names[id(parameter)])
        for module in model.modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None
    ]
    return [(place, name) for place, name in places if place != owners[name]]

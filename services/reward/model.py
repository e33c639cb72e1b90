"""A reward model: how samples become its tokens, and what its logits mean. Loaded by the process of worker.py alone.

Letters: B samples of a batch, L labels of the model, T tokens of the longest sample.
"""

from __future__ import annotations

from typing import Any, Protocol

from services.reward.signals import Encoded, Score, finite, invalid, raised
from shared.config import Signal
from shared.errors import ConfigError, StrettoError

_PLACE = "\ue000completion\ue000"
"""Stands where the completion goes while a template is rendered; characters of no script."""


class Classifier(Protocol):
    """What runs a sequence classifier."""

    def logits(self, batch: list[Encoded]) -> list[list[float]]:
        """[B][L] raw logits, whatever the padding."""


class RewardModel:
    """A sequence classifier, one logit of which is the value of a sample."""

    def __init__(self, signal: Signal) -> None:
        """Raises StrettoError where the model cannot be loaded or has no such label."""
        assert signal.model is not None
        self._name = signal.name
        self._label = signal.label
        try:
            from transformers import AutoConfig, AutoTokenizer

            config = AutoConfig.from_pretrained(signal.model)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(signal.model)
            self._classifier = _classifier(signal.model, signal)
        except ImportError as error:
            extra = {"torchao": "int8", "vllm": "vllm"}.get(error.name or "", "cpu")
            raise ConfigError(
                f"signal {signal.name}: its model needs {error.name}: pip install 'stretto[{extra}]'"
            ) from error
        except StrettoError:
            raise
        except Exception as error:
            raise StrettoError(
                f"signal {signal.name}: {signal.model} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        if signal.label >= config.num_labels:
            raise ConfigError(
                f"signal {signal.name}: label is {signal.label}, but {signal.model} has {config.num_labels}"
            )
        self._longest = min(self._tokenizer.model_max_length, getattr(config, "max_position_embeddings", 1 << 30))

    def score(self, samples: list[dict[str, Any]]) -> list[Score]:
        """The score of each sample, given by `messages` and `completion`; whatever fails makes its sample invalid."""
        scores: dict[int, Score] = {}
        encoded: dict[int, Encoded] = {}
        for i, sample in enumerate(samples):
            try:
                encoded[i] = encode(self._tokenizer, sample["messages"], sample["completion"])
            except Exception as error:
                scores[i] = raised(self._name, error)
                continue
            if not 0 < (length := len(encoded[i]["input_ids"])) <= self._longest:
                del encoded[i]
                scores[i] = invalid(f"{self._name}: the sample has {length} tokens, its model takes {self._longest}")
        scores |= zip(encoded, self._values(list(encoded.values())), strict=True)
        return [scores[i] for i in range(len(samples))]

    def _values(self, batch: list[Encoded]) -> list[Score]:
        """The scores of samples that the model can take; a batch that fails is halved until the culprit is alone."""
        if not batch:
            return []
        try:
            logits = self._classifier.logits(batch)
        except Exception as error:
            if len(batch) == 1:
                return [raised(self._name, error)]
            half = len(batch) // 2
            return self._values(batch[:half]) + self._values(batch[half:])
        return [finite(row[self._label], f"{self._name} returned") for row in logits]


def encode(tokenizer: Any, messages: str | list[dict[str, str]], completion: str) -> Encoded:
    """The tokens of a sample: prompt and completion as a chat where there is a template, else as a pair of texts.

    A completion is text, also where it spells out a special token: it cannot end its message and begin another.
    """
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        rendered = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": _PLACE}], tokenize=False)
        before, _, after = rendered.rpartition(_PLACE)
        head, tail = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, after))
        own = tokenizer(completion, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return {"input_ids": [*head, *own, *tail]}
    prompt = messages if isinstance(messages, str) else "\n".join(message["content"] for message in messages)
    found = tokenizer(prompt, completion, split_special_tokens=True)
    return {name: list(found[name]) for name in ("input_ids", "token_type_ids") if name in found}


def _classifier(model_name: str, signal: Signal) -> Classifier:
    if signal.backend == "vllm":
        from services.reward.vllm_classifier import VllmClassifier

        return VllmClassifier(model_name, signal)
    from services.reward.torch_classifier import TorchClassifier

    return TorchClassifier(model_name, signal)

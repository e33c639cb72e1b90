"""What an engine knows of a tokenizer: how tokens become text, and which of them end a sample."""

from __future__ import annotations

from typing import Any

from shared.errors import DataError


class Vocabulary:
    """End tokens, special tokens, and the text of an answer."""

    def __init__(self, tokenizer: Any, end_tokens: set[int]) -> None:
        self.end_tokens = end_tokens
        self.special_tokens = end_tokens | set(tokenizer.all_special_ids)
        self._tokenizer = tokenizer

    def text(self, tokens: list[int], stop: tuple[str, ...] = ()) -> str:
        """The decoded tokens, special ones left out, up to the first of the strings in `stop`."""
        visible = [token for token in tokens if token not in self.special_tokens]
        text = str(self._tokenizer.decode(visible, clean_up_tokenization_spaces=False))
        found = [at for string in stop if (at := text.find(string)) >= 0]
        return text[: min(found, default=len(text))]


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a model folder. Raises DataError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot load the tokenizer {folder}: {error}") from error


def end_tokens(generation_config: Any, tokenizer: Any) -> set[int]:
    """Ids that end a sample: those of the generation config (of transformers) and the tokenizer's own."""
    ids = generation_config.eos_token_id
    ends = set(ids if isinstance(ids, list) else [ids])
    ends.add(tokenizer.eos_token_id)
    return ends - {None}

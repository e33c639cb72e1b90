"""Prompts as tokens: chat template, system message, and the checks that a tokenizer is fit for training."""

from __future__ import annotations

from typing import Any

from shared.config import Data
from shared.errors import DataError, SelfCheckError
from shared.group import Prompt


class PromptRenderer:
    """Turns prompts into token ids with a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, data: Data) -> None:
        """Raises DataError where chat is asked for and the tokenizer has no chat template."""
        if data.chat and not tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template; give one, or set data.chat to false for plain text")
        self._tokenizer = tokenizer
        self._data = data

    def messages(self, prompt: Prompt) -> list[dict[str, str]]:
        """The chat that a prompt stands for, with the system message of the config first."""
        content = prompt.content
        chat = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        if self._data.system is not None and chat[0]["role"] != "system":
            chat = [{"role": "system", "content": self._data.system}, *chat]
        return chat

    def tokens(self, prompt: Prompt) -> list[int]:
        """Token ids of the prompt, up to where the policy goes on."""
        if self._data.chat:
            return self._render(self.messages(prompt), add_generation_prompt=True)
        if not isinstance(prompt.content, str):
            raise DataError(f"row {prompt.row} holds chat messages, but data.chat is false")
        return list(self._tokenizer(prompt.content)["input_ids"])

    def check(self, prompt: Prompt, end_tokens: set[int]) -> None:
        """Check the tokenizer on one prompt: text survives, an answer only appends, and an end token is known.

        Masks come from lengths, so a pad token that equals the end token does no harm and is not looked at.
        Raises SelfCheckError, which names what is wrong.
        """
        text = prompt.text
        back = self._tokenizer.decode(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if back != text:
            raise SelfCheckError(f"the tokenizer changes text: {text!r} comes back as {back!r}")
        vocabulary = len(self._tokenizer)
        if not end_tokens or max(end_tokens) >= vocabulary:
            raise SelfCheckError(
                f"the end tokens are {sorted(end_tokens)} of a vocabulary of {vocabulary}: set eos_token_id in the "
                "model's generation_config.json"
            )
        if self._data.chat:
            self._check_template(prompt, end_tokens)

    def _check_template(self, prompt: Prompt, end_tokens: set[int]) -> None:
        chat = self.messages(prompt)
        before = self._render(chat, add_generation_prompt=True)
        after = self._render([*chat, {"role": "assistant", "content": "yes"}], add_generation_prompt=False)
        if after[: len(before)] != before:
            raise SelfCheckError(
                "the chat template rewrites the prompt once an answer follows, so the policy would be trained on "
                f"another prompt than it answered: {self._tokenizer.decode(before)!r} is no prefix of "
                f"{self._tokenizer.decode(after)!r}"
            )
        if not end_tokens & set(after[len(before) :]):
            raise SelfCheckError(
                f"the chat template ends an answer with {self._tokenizer.decode(after[-2:])!r}, but the end tokens are "
                f"{self._tokenizer.convert_ids_to_tokens(sorted(end_tokens))}: no answer would ever end. Set "
                "eos_token_id in the model's generation_config.json"
            )

    def _render(self, chat: list[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            chat, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=True
        )
        return list(rendered["input_ids"])

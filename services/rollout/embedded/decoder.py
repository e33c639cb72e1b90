"""The decoding loop: requests join between two steps, all samples in flight take one token a step. No threads, no I/O.

Called by the engine's thread, which calls `step` while there is work.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.rollout.embedded.attention import Attend, PromptPass
from services.rollout.embedded.kv import KVCache, Shape
from services.rollout.embedded.parameters import Parameters
from services.rollout.embedded.sampler import draw
from services.rollout.embedded.sequence import Group, Job, Sequence
from services.rollout.engine import Request, Sample, Weights
from services.rollout.vocabulary import Vocabulary
from shared.group import FinishReason

PROMPT_TOKENS_PER_PASS = 4096


class Decoder:
    """Samples of any number of requests on one model, at most `max_samples` at once.

    version: policy version of the weights, written beside each token.
    """

    def __init__(self, model: Any, vocabulary: Vocabulary, *, max_samples: int, max_context: int, version: int) -> None:
        config = model.config.get_text_config()
        heads = config.num_key_value_heads or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.model = model
        self.version = version
        self.max_context = max_context
        self._max_samples = max_samples
        self._vocabulary = vocabulary
        self._parameters = Parameters(model)
        self._cache = KVCache(Shape(config.num_hidden_layers, heads, head_size, model.dtype))
        self._waiting: list[Group] = []
        self.steps = self.tokens = self.samples = self.prompt_tokens = 0

    @property
    def samples_in_flight(self) -> int:
        """Samples that are being decoded."""
        return len(self._cache.rows)

    @property
    def samples_waiting(self) -> int:
        """Samples that wait for a place."""
        return sum(len(group.indices) for group in self._waiting)

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._cache.rows and not self._waiting

    def submit(self, request: Request, on_done: Callable[[list[Sample]], None]) -> None:
        """Queue a request, in pieces of at most max_samples; each piece reads the prompt anew."""
        room = self.max_context - len(request.prompt_tokens)
        job = Job(request, min(request.sampling.max_tokens, room), on_done)
        for start in range(0, request.n, self._max_samples):
            group = Group(job, range(start, min(start + self._max_samples, request.n)))
            insort(self._waiting, group, key=lambda waiting: waiting.job.request.priority)

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """End all samples of a request; it is done with what there is. Nothing happens where it is not in flight."""
        for index in reversed(range(len(self._cache.rows))):
            if self._cache.rows[index].group.job.request.request_id == request_id:
                self._end(index, FinishReason.ABORTED)
        for group in [g for g in self._waiting if g.job.request.request_id == request_id]:
            self._waiting.remove(group)
            for sequence in self._sequences(group):
                group.job.finish(sequence.index, sequence.sample(FinishReason.ABORTED))

    def swap(self, weights: Weights) -> None:
        """Use other weights from the next step on. Samples in flight keep their K/V. Raises WeightsError."""
        self._parameters.point(weights.tensors)
        self.version = weights.version

    @torch.inference_mode()
    def score(self, tokens: list[int]) -> np.ndarray:
        """[T-1] float32 log-probs of tokens[1:] at temperature 1."""
        logits = self._forward(tokens, list(range(len(tokens))), PromptPass([len(tokens)]).attend)[:-1].float()
        chosen = logits.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        return (chosen - logits.logsumexp(-1)).numpy()

    @torch.inference_mode()
    def step(self) -> None:
        """Start what there is room for, then take one token for every sample."""
        self.steps += 1
        if groups := self._admit():
            self._start(groups)
        if self._cache.rows:
            self._advance()

    def _admit(self) -> list[Group]:
        """The groups that start now, in their order, while there are places."""
        room, tokens = self._max_samples - len(self._cache.rows), PROMPT_TOKENS_PER_PASS
        groups: list[Group] = []
        while self._waiting:
            group = self._waiting[0]
            if len(group.indices) > room or (groups and len(group.prompt) > tokens):
                break
            room -= len(group.indices)
            tokens -= len(group.prompt)
            groups.append(self._waiting.pop(0))
        return groups

    def _start(self, groups: list[Group]) -> None:
        """Read the prompts in one pass and draw the first token of each sample."""
        for group in groups:
            self._cache.add_prompt(group)
        lengths = [len(group.prompt) for group in groups]
        prompts = PromptPass(lengths, lambda number, *kv: self._cache.store_prompt(groups[number], *kv))
        logits = self._forward(
            [token for group in groups for token in group.prompt],
            [position for length in lengths for position in range(length)],
            prompts.attend,
            keep=torch.tensor(lengths).cumsum(0) - 1,
        )
        self.prompt_tokens += sum(lengths)
        sequences = [sequence for group in groups for sequence in self._sequences(group)]
        source = torch.tensor([len(group.indices) for group in groups])
        reasons = self._draw(logits.repeat_interleave(source, dim=0), sequences)
        for sequence, reason in zip(sequences, reasons, strict=True):
            if reason is None:
                self._cache.add_row(sequence)
            else:
                self._finish(sequence, reason)
        for group in groups:
            if group.live == 0:
                self._cache.remove_prompt(group)

    def _advance(self) -> None:
        """One token for every sample in flight."""
        rows = self._cache.rows
        logits = self._forward(
            [row.tokens[-1] for row in rows],
            [len(row.group.prompt) + len(row.tokens) - 1 for row in rows],
            self._cache.next_pass().attend,
        )
        reasons = self._draw(logits, rows)
        # From the last row on, since a row that ends is replaced by the last one.
        for index in reversed(range(len(rows))):
            if (reason := reasons[index]) is not None:
                self._end(index, reason)

    def _forward(self, tokens: list[int], positions: list[int], attend: Attend, keep: Tensor | int = 0) -> Tensor:
        """[N, V] logits of one pass; `keep` names the positions whose logits are computed."""
        logits: Tensor = self.model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=keep,
            attend=attend,
        ).logits
        return logits[0]

    def _draw(self, logits: Tensor, sequences: list[Sequence]) -> list[FinishReason | None]:
        """Draw the next token of each sample; tells which samples end with it, and why."""
        samplings = [sequence.group.job.request.sampling for sequence in sequences]
        tokens, logprobs = draw(logits, [sequence.uniform() for sequence in sequences], samplings)
        self.tokens += len(tokens)
        drawn = zip(sequences, tokens, logprobs, strict=True)
        return [sequence.append(token, logprob, self.version) for sequence, token, logprob in drawn]

    def _sequences(self, group: Group) -> list[Sequence]:
        return [Sequence(group, index, self._vocabulary) for index in group.indices]

    def _end(self, index: int, reason: FinishReason) -> None:
        sequence = self._cache.rows[index]
        self._cache.remove_row(index)
        self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self.samples += 1
        sequence.group.job.finish(sequence.index, sequence.sample(reason))

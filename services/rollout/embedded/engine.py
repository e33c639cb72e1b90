"""The embedded engine: a transformers model, decoded by a loop of our own in one thread. The rollout service holds one.

CPU; any number of torch threads, as set by the process. What was measured and chosen: docs/engine.md.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.rollout.embedded.decoder import Decoder
from services.rollout.embedded.model import load_model
from services.rollout.engine import Request, Sample, Weights, check_prompt, check_tokens
from services.rollout.vocabulary import Vocabulary, end_tokens, load_tokenizer
from shared.errors import ConfigError, DataError, EngineFailed, StrettoError
from shared.log import log

CLOSE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Command:
    """Work for the thread between two steps. It settles `future` itself, by `_settle`, at once or later."""

    work: Callable[[], None]
    future: asyncio.Future[Any]


class EmbeddedEngine:
    """An `Engine` (services/rollout/engine.py).

    model, tokenizer: of transformers. end_tokens: ids that end a sample. on_state: called from the engine's thread
    with True when it begins to generate and with False when nothing is left to do.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, max_samples: int, max_context: int, initial_version: int | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens(model.generation_config, tokenizer)
        self.on_state: Callable[[bool], None] = lambda busy: None
        version = -1 if initial_version is None else initial_version
        vocabulary = Vocabulary(tokenizer, self.end_tokens)
        self._decoder = Decoder(model, vocabulary, max_samples=max_samples, max_context=max_context, version=version)
        self._outbox: list[_Command] = []
        self._inbox: queue.SimpleQueue[list[_Command] | None] = queue.SimpleQueue()
        self._open: dict[asyncio.Future[Any], str | None] = {}
        self._ended = ""
        self._busy = False
        self._busy_s = 0.0
        self._swaps = 0
        self._thread = threading.Thread(target=self._run, name="embedded engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        folder: str,
        *,
        dtype: str,
        max_samples: int,
        max_context: int | None = None,
        tokenizer: str | None = None,
        initial_version: int | None = None,
    ) -> EmbeddedEngine:
        """Load a model folder. Its weights give the layout; they generate only where `initial_version` names them.

        dtype: float32, bfloat16 or float16. max_samples: samples decoded at once. max_context: most tokens of prompt
        and sample, by default the model's own limit. tokenizer: folder, by default the model's.
        Raises DataError where there is no usable model, ConfigError where max_context is beyond the model's limit.
        """
        model = load_model(folder, dtype)
        limit: int = model.config.get_text_config().max_position_embeddings
        if max_context is not None and max_context > limit:
            raise ConfigError(
                f"rollout.max_context is {max_context}, but the model {folder} was made for {limit} tokens: lower it"
            )
        return cls(
            model,
            load_tokenizer(tokenizer or folder),
            max_samples=max_samples,
            max_context=max_context or limit,
            initial_version=initial_version,
        )

    @property
    def version(self) -> int:
        """Policy version of the weights; -1 before the first swap."""
        return self._decoder.version

    async def generate(self, request: Request) -> list[Sample]:
        """The n samples of a request.

        Raises DataError where the prompt does not fit or holds unknown tokens, StrettoError before the first swap,
        for an id that is in flight already, after `close`, and after a failure of the engine.
        """
        check_prompt(request, self._decoder.max_context, self._vocabulary_size)
        if self.version < 0:
            raise StrettoError(f"{request.request_id} came before the engine had any weights of the run: swap first")
        if request.request_id in self._open.values():
            raise StrettoError(f"{request.request_id} is in flight already: give each request an id of its own")
        future = self._future(request.request_id)
        self._send(future, lambda: self._decoder.submit(request, lambda samples: self._settle(future, samples)))
        try:
            samples: list[Sample] = await future
        except asyncio.CancelledError:
            if not self._ended:
                self._post(lambda: self._decoder.abort(request.request_id))
            raise
        return samples

    async def abort(self, request_id: str) -> None:
        """End the samples of a request; its `generate` returns what there is, with FinishReason.ABORTED."""
        await self._post(lambda: self._decoder.abort(request_id))

    async def swap(self, weights: Weights) -> float:
        """Use new weights from the next step on. Returns the seconds between two steps that it took.

        Samples in flight keep the K/V that older weights made. Raises WeightsError, with the old weights still in
        place, where names, shapes or dtypes are not the model's.
        """

        def flip() -> float:
            start = time.perf_counter()
            self._decoder.swap(weights)
            self._swaps += 1
            return time.perf_counter() - start

        pause_s: float = await self._post(flip)
        return pause_s

    async def score(self, tokens: list[int]) -> np.ndarray:
        """[T-1] float32 log-probs of tokens[1:] under the current weights at temperature 1. Raises DataError."""
        if not 2 <= len(tokens) <= self._decoder.max_context:
            raise DataError(
                f"a sequence to score has {len(tokens)} tokens; it must have from 2 to {self._decoder.max_context} "
                "(rollout.max_context)"
            )
        check_tokens(tokens, self._vocabulary_size, "a sequence to score")
        logprobs: np.ndarray = await self._post(lambda: self._decoder.score(tokens))
        return logprobs

    def stats(self) -> dict[str, float]:
        """Figures since the start."""
        decoder = self._decoder
        return {
            "samples_in_flight": decoder.samples_in_flight,
            "samples_waiting": decoder.samples_waiting,
            "samples": decoder.samples,
            "tokens": decoder.tokens,
            "prompt_tokens": decoder.prompt_tokens,
            "steps": decoder.steps,
            "swaps": self._swaps,
            "busy_s": self._busy_s,
        }

    @property
    def _vocabulary_size(self) -> int:
        size: int = self.model.config.get_text_config().vocab_size
        return size

    async def failed(self) -> None:
        """Raises EngineFailed once the engine generates no more; does not return before."""
        await self._future()

    async def close(self) -> None:
        """Stop; requests in flight end with an error. Raises StrettoError where a step does not end in a minute."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            raise StrettoError(f"the engine's thread did not end within {CLOSE_S:.0f} s: a decoding step hangs")

    def _future(self, request_id: str | None = None) -> asyncio.Future[Any]:
        """A future that fails with the engine; it is in `_open` until it is done."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[future] = request_id
        # Looked at after the future is in `_open`: the thread writes first and then goes through `_open`.
        if self._ended:
            del self._open[future]
            raise EngineFailed(self._ended)
        future.add_done_callback(lambda done: self._open.pop(done, None))
        return future

    def _post(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        """Have the thread call `work` between two steps; the future gets what it returns."""
        future = self._future()
        self._send(future, lambda: self._settle(future, work()))
        return future

    def _send(self, future: asyncio.Future[Any], work: Callable[[], None]) -> None:
        # Sent at the end of this turn of the loop, so that requests made in one turn start in one pass.
        if not self._outbox:
            future.get_loop().call_soon(self._flush)
        self._outbox.append(_Command(work, future))

    def _flush(self) -> None:
        self._inbox.put(self._outbox)
        self._outbox = []

    # From here on: the engine's thread.

    def _run(self) -> None:
        ended = "the engine was closed"
        try:
            while self._obey():
                start = time.perf_counter()
                self._decoder.step()
                self._busy_s += time.perf_counter() - start
                self._tell_state()
        except Exception as error:  # whatever it is, all who wait must hear of it
            log.exception("the embedded engine failed")
            ended = (
                f"the embedded engine failed with {type(error).__name__}: {error} ({self._decoder.samples_in_flight} "
                f"samples in flight, {self._decoder.samples_waiting} waiting) and generates no more: restart it"
            )
        self._ended = ended
        for future in list(self._open):
            self._settle(future, EngineFailed(ended))

    def _obey(self) -> bool:
        """Do what was asked for; while there is nothing to decode, wait for it. False: end."""
        while True:
            try:
                commands = self._inbox.get(block=self._decoder.idle)
            except queue.Empty:
                return True
            if commands is None:
                return False
            for command in commands:
                try:
                    command.work()
                except StrettoError as error:
                    self._settle(command.future, error)
            self._tell_state()

    def _tell_state(self) -> None:
        busy = not self._decoder.idle
        if busy != self._busy:
            self._busy = busy
            self.on_state(busy)

    def _settle(self, future: asyncio.Future[Any], result: Any) -> None:
        """Give a future its result or error, in its own loop; nothing where nobody waits any more."""

        def settle() -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        if not future.get_loop().is_closed():
            future.get_loop().call_soon_threadsafe(settle)

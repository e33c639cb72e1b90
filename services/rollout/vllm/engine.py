"""The vLLM engine: AsyncLLM behind the interface of services/rollout/engine.py. The rollout service holds one.

vLLM computes in processes of its own ("engine cores"); what is here runs in the service's event loop. How weights get
there: transfer.py.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import numpy as np

from services.rollout.engine import Request, Sample, Weights, check_prompt, check_tokens
from services.rollout.vllm.arguments import check, engine_arguments, set_environment
from services.rollout.vllm.remains import Remains
from services.rollout.vocabulary import Vocabulary, end_tokens, load_tokenizer
from shared.config import Rollout
from shared.errors import DataError, EngineFailed, StrettoError, WeightsError

STAGED_POLL_S = 0.005
ALIVE_POLL_S = 0.5
SWAP_DEADLINE_S = 300.0
CLOSE_S = 10.0
SCORE_PRIORITY = -(2**31)  # before all samples that wait, since some of those in flight may wait for the proof


class VllmEngine:
    """An `Engine` (services/rollout/engine.py).

    tokenizer: of transformers. end_tokens: ids that end a sample. llm: vLLM's AsyncLLM, for what is not in `Engine`
    (sleep and wake_up, LoRA).
    """

    def __init__(self, llm: Any, figures: Any, tokenizer: Any, ends: set[int], rollout: Rollout) -> None:
        self.llm = llm
        self.tokenizer = tokenizer
        self.end_tokens = ends
        self._figures = figures
        self._vocabulary = Vocabulary(tokenizer, ends)
        self._max_context: int = llm.model_config.max_model_len
        self._vocabulary_size: int = llm.model_config.get_vocab_size()
        self._stages = rollout.vllm.stage
        self._copies = rollout.vllm.data_parallel
        self._has_pipeline = rollout.vllm.pipeline_parallel > 1
        self._order = asyncio.Lock()  # swaps and scores, first come, first served
        self._lineage, self._version = 0, -1
        self._swaps = 0
        cores = getattr(llm.engine_core.resources.engine_manager, "processes", ())  # none where Ray runs them
        self._remains = Remains([core.pid for core in cores])
        self._open: dict[str, int] = {}
        self._void: set[str] = set()
        self._ended = ""
        self._samples = self._tokens = self._prompt_tokens = 0
        self._busy_s, self._busy_since = 0.0, 0.0

    @classmethod
    def load(cls, folder: str, rollout: Rollout, *, tokenizer: str | None = None) -> VllmEngine:
        """Start vLLM on a model folder. Call it from a thread; it takes from seconds to minutes.

        tokenizer: folder, by default the model's. Raises ConfigError where vLLM is missing or refuses the settings,
        DataError where there is no usable model, EngineFailed where vLLM does not start.
        """
        check(rollout)
        set_environment()
        from transformers import GenerationConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        from services.rollout.vllm.stats import SchedulerFigures

        words = load_tokenizer(tokenizer or folder)
        arguments = engine_arguments(folder, tokenizer or folder, rollout, is_cpu=current_platform.is_cpu())
        figures = SchedulerFigures()
        try:
            settings = AsyncEngineArgs(**arguments)
            llm = AsyncLLM.from_engine_args(settings, stat_loggers=[figures])
        except (TypeError, ValueError) as error:
            raise DataError(f"vLLM cannot run {folder} as it is asked to: {error}") from error
        except RuntimeError as error:
            raise EngineFailed(
                f"vLLM did not start with {folder}: {error}; the reason is in this service's log"
            ) from error
        try:
            generation = GenerationConfig.from_pretrained(folder)
        except OSError:
            generation = GenerationConfig.from_model_config(llm.model_config.hf_config)
        engine = cls(llm, figures, words, end_tokens(generation, words), rollout)
        del llm  # importing vLLM leaves a reference to this frame somewhere, which must not keep it alive after `close`
        return engine

    @property
    def version(self) -> int:
        """Policy version of the weights; -1 before the first swap."""
        return self._version

    async def generate(self, request: Request) -> list[Sample]:
        """The n samples of a request.

        Raises DataError where the prompt does not fit or holds unknown tokens, StrettoError before the first swap, for
        an id that is in flight already, and where weights that were wrong took part; EngineFailed after `close` and
        where vLLM has died.
        """
        from services.rollout.vllm.sampling import sample_of, sampling_params

        check_prompt(request, self._max_context, self._vocabulary_size)
        if self._version < 0:
            raise StrettoError(f"{request.request_id} came before the engine had any weights of the run: swap first")
        if request.request_id in self._open:
            raise StrettoError(f"{request.request_id} is in flight already: give each request an id of its own")
        limit = min(request.sampling.max_tokens, self._max_context - len(request.prompt_tokens))
        self._opens(request.request_id, request.n)
        try:
            output = await self._last_output(
                request.prompt_tokens,
                sampling_params(request, limit, self._vocabulary),
                request.request_id,
                request.priority,
            )
            if request.request_id in self._void:
                raise StrettoError(f"{request.request_id} was made with weights that were wrong: make it anew")
        finally:
            self._closes(request.request_id)
        samples = [sample_of(completion, request, self._vocabulary) for completion in output.outputs]
        self._samples += len(samples)
        self._tokens += sum(len(sample.tokens) for sample in samples)
        self._prompt_tokens += len(request.prompt_tokens)
        return samples

    async def abort(self, request_id: str) -> None:
        """End the samples of a request; its `generate` returns what there is, with FinishReason.ABORTED."""
        async with self._failing():
            await self.llm.abort(request_id)

    async def swap(self, weights: Weights) -> float:
        """Use new weights from the next step on. Returns the seconds in which nothing was generated.

        Samples in flight keep the K/V that older weights made; requests from then on do not use it. Raises WeightsError
        where the weights are not in shared memory, or are not this model's: with the old weights still in place where
        they were staged, and no more to be generated where not.
        """
        if weights.slot is None:
            raise WeightsError("vLLM takes weights from shared memory, and these are not there")
        async with self._order, self._failing(), asyncio.timeout(SWAP_DEADLINE_S):
            if self._swaps == 0:
                await self._call("init_weight_transfer_engine", {"stage": self._stages})
                if self._has_pipeline:
                    await self._call("warm_up")
            info = _update_info(weights, self._swaps + 1)
            if self._stages:
                await self._stage(info)
            if self._swaps and (weights.lineage, weights.version) == (self._lineage, self._version):
                # The same weights once more: they were wrong the first time, and so is what was made with them.
                self._void.update(self._open)
                await self.llm.abort(list(self._open))
            return await self._exchange(info)

    async def _stage(self, info: dict[str, Any]) -> None:
        try:
            await self._call("stage_weights", info)
            while not all(await self._call("weights_are_staged")):
                await asyncio.sleep(STAGED_POLL_S)
        except StrettoError:
            raise
        except Exception as error:
            self._raise_if_dead()
            raise WeightsError(f"vLLM cannot load version {info['version']}: {error}") from error

    async def _exchange(self, info: dict[str, Any]) -> float:
        # Not llm.pause_generation: it sleeps for 20 ms more. Versions are told apart in the engine core, by step.
        await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        start = time.perf_counter()
        try:
            await self.llm.start_weight_update()
            await self._call("update_weights", info)
            await self.llm.finish_weight_update(str(info["version"]))
        except Exception as error:
            self._raise_if_dead()
            self._ended = f"the engine stands still: vLLM could not load version {info['version']}: {error}"
            raise WeightsError(self._ended) from error
        self._swaps = info["number"]
        self._lineage, self._version = info["lineage"], info["version"]
        await self.llm.resume_generation()
        return time.perf_counter() - start

    async def score(self, tokens: list[int]) -> np.ndarray:
        """[T-1] float32 log-probs of tokens[1:] under the current weights at temperature 1.

        [C, T-1] with C copies of the model (rollout.vllm.data_parallel). Raises DataError.
        """
        if not 2 <= len(tokens) < self._max_context:
            raise DataError(
                f"a sequence to score has {len(tokens)} tokens; it must have at least 2 and fewer than "
                f"{self._max_context} (rollout.max_context)"
            )
        check_tokens(tokens, self._vocabulary_size, "a sequence to score")
        async with self._order:
            if self._copies == 1:
                return await self._score(tokens)
            return np.stack(await asyncio.gather(*(self._score(tokens, copy) for copy in range(self._copies))))

    async def _score(self, tokens: list[int], copy: int | None = None) -> np.ndarray:
        from services.rollout.vllm.sampling import prompt_logprobs, scoring_params

        name = f"score/{self._swaps}/{time.monotonic_ns()}/{copy}"
        return prompt_logprobs(await self._last_output(tokens, scoring_params(), name, SCORE_PRIORITY, copy), tokens)

    async def failed(self) -> None:
        """Raises EngineFailed once vLLM has died or stands still; does not return before."""
        while True:
            self._raise_if_dead()
            await asyncio.sleep(ALIVE_POLL_S)

    def stats(self) -> dict[str, float]:
        """Figures since the start, and vLLM's own of its last step."""
        busy_s = self._busy_s + (time.monotonic() - self._busy_since if self._open else 0.0)
        return {
            **self._figures.figures(),
            "samples": self._samples,
            "tokens": self._tokens,
            "prompt_tokens": self._prompt_tokens,
            "swaps": self._swaps,
            "busy_s": busy_s,
        }

    async def close(self) -> None:
        """Stop; requests in flight end with an error."""
        self._ended = self._ended or "the engine was closed"
        llm, self.llm = self.llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, CLOSE_S)
            del llm
            gc.collect()  # what vLLM does when it is collected fails at the end of the process
            await asyncio.to_thread(self._remains.remove, CLOSE_S)

    async def _last_output(
        self, tokens: list[int], params: Any, request_id: str, priority: int, copy: int | None = None
    ) -> Any:
        # Blocks of the prefix cache are found by the salt too: those of older weights never again.
        prompt = {"prompt_token_ids": tokens, "cache_salt": str(self._swaps)}
        async with self._failing():
            answer = self.llm.generate(prompt, params, request_id, priority=priority, data_parallel_rank=copy)
            async with aclosing(answer) as outputs:
                async for output in outputs:
                    if output.finished:
                        return output
            self._raise_if_dead()
            raise StrettoError(f"vLLM gave no answer to {request_id}")

    async def _call(self, method: str, info: dict[str, Any] | None = None) -> list[Any]:
        """Call a method of all workers that takes the information about an update; their answers."""
        answers: list[Any] = await self.llm.collective_rpc(method, args=() if info is None else (info,))
        return answers

    @asynccontextmanager
    async def _failing(self) -> AsyncIterator[None]:
        """Turns what vLLM raises once it is dead into EngineFailed, and a missed deadline too."""
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self._raise_if_dead()
        try:
            yield
        except EngineDeadError:
            self._raise_if_dead()
            raise EngineFailed(_dead()) from None
        except TimeoutError:
            self._ended = self._ended or f"vLLM did not take new weights within {SWAP_DEADLINE_S:.0f} s"
            raise EngineFailed(self._ended) from None
        except EngineGenerateError as error:
            self._raise_if_dead()
            raise StrettoError(f"vLLM could not answer: {error.__cause__ or error}") from error

    def _raise_if_dead(self) -> None:
        if not self._ended and self.llm.errored:
            self._ended = _dead()
        if self._ended:
            raise EngineFailed(self._ended)

    def _opens(self, request_id: str, n: int) -> None:
        if not self._open:
            self._busy_since = time.monotonic()
        self._open[request_id] = n

    def _closes(self, request_id: str) -> None:
        del self._open[request_id]
        self._void.discard(request_id)
        if not self._open:
            self._busy_s += time.monotonic() - self._busy_since


def _update_info(weights: Weights, number: int) -> dict[str, Any]:
    """transfer.UpdateInfo as a map of plain values."""
    assert weights.slot is not None
    layout = weights.slot.layout
    return {
        "number": number,
        "file": weights.slot.file,
        "slot": weights.slot.number,
        "lineage": weights.lineage,
        "version": weights.version,
        "tensors": [[name, dtype, list(shape), at] for name, (dtype, shape, at) in layout.tensors.items()],
        "size_bytes": layout.size_bytes,
    }


def _dead() -> str:
    return "vLLM's engine core has died and generates no more; the reason is in this service's log"

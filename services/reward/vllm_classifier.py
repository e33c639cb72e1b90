"""Runs a sequence classifier by vLLM's pooling runner, in the process that loads it. For model.py.

Letters: B samples of a batch, L labels of the model.
"""

from __future__ import annotations

import os

from services.reward.signals import Encoded
from shared.config import Signal
from shared.errors import DataError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker is a process of its own, which a kill must end whole
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the launcher gives out cores and threads
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
GPU_MEMORY_UTILIZATION = 0.3


class VllmClassifier:
    """A model in vLLM; the environment may set what is set here."""

    def __init__(self, model_name: str, signal: Signal) -> None:
        """Raises whatever vLLM does."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm import LLM, PoolingParams
        from vllm.platforms import current_platform

        self._name = signal.name
        self._llm = LLM(
            model=model_name,
            runner="pooling",
            dtype=signal.dtype,
            max_num_seqs=signal.batch_size,
            gpu_memory_utilization=GPU_MEMORY_UTILIZATION,
            enforce_eager=current_platform.is_cpu(),
        )
        self._params = PoolingParams(use_activation=False)
        self._pad: int | None = self._llm.model_config.hf_config.pad_token_id

    def logits(self, batch: list[Encoded]) -> list[list[float]]:
        """[B][L] raw logits, float32. Raises DataError where samples have token types, which vLLM is not given."""
        if any(any(encoded.get("token_type_ids", ())) for encoded in batch):
            raise DataError(f"{self._name} reads token types, which the backend vllm does not have: set backend hf")
        prompts = [{"prompt_token_ids": self._without_pads(encoded["input_ids"])} for encoded in batch]
        outputs = self._llm.encode(prompts, pooling_params=self._params, pooling_task="classify", use_tqdm=False)
        return [output.outputs.data.float().tolist() for output in outputs]

    def _without_pads(self, tokens: list[int]) -> list[int]:
        """Tokens without pads at their end: a causal classifier of transformers reads the last token that is none."""
        end = len(tokens)
        while end > 1 and tokens[end - 1] == self._pad:
            end -= 1
        return tokens[:end]

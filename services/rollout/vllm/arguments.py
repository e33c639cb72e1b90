"""What VllmEngine starts vLLM with: environment and engine arguments, from the run config."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from services.rollout.vllm import BACKEND
from shared.config import Rollout
from shared.errors import ConfigError

ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a rollout has threads and sockets, which a fork would break
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the launcher gives out cores and threads
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_CACHE_GIB = 1.0
OURS = {
    "model", "tokenizer", "dtype", "max_model_len", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size",
    "data_parallel_size", "gpu_memory_utilization", "kv_cache_memory_bytes", "enforce_eager", "logprobs_mode",
    "scheduling_policy", "generation_config", "disable_log_stats", "weight_transfer_config", "worker_extension_cls",
}  # fmt: skip


def check(rollout: Rollout) -> None:
    """Raise ConfigError where vLLM is not installed, or rollout.vllm.args sets what other settings decide."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("rollout.engine is vllm, which is not installed: pip install 'stretto[vllm]'")
    taken = sorted(OURS & set(rollout.vllm.args))
    if taken:
        raise ConfigError(f"rollout.vllm.args sets {', '.join(taken)}, which other settings of the run decide: remove")


def set_environment() -> None:
    """Set what vLLM reads from the environment when it is imported, but for what the user has set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def engine_arguments(folder: str, tokenizer: str, rollout: Rollout, *, is_cpu: bool) -> dict[str, Any]:
    """Keyword arguments for AsyncEngineArgs."""
    settings = rollout.vllm
    arguments: dict[str, Any] = {
        "model": folder,
        "tokenizer": tokenizer,
        "dtype": rollout.dtype,
        "max_model_len": rollout.max_context,
        "max_num_seqs": rollout.max_samples,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "data_parallel_size": settings.data_parallel,
        "enforce_eager": is_cpu if settings.enforce_eager is None else settings.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "scheduling_policy": "priority",
        "generation_config": "vllm",  # no sampling parameters from the model's folder
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": "services.rollout.vllm.transfer.Extension",
    }
    cache_gib = settings.cache_gib or (CPU_CACHE_GIB if is_cpu else None)
    if cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(cache_gib * 2**30)
    if settings.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
    return arguments | settings.args

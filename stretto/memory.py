"""How much memory the models of a run will need, by service: what can be known before it starts."""

from __future__ import annotations

import json
import math
from pathlib import Path

from shared.config import Learner, RunConfig, Signal, Training

SIZE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


def policy_memory(config: RunConfig, parameters: int | None) -> list[tuple[str, str]]:
    """A line for each place that holds the policy. parameters: None where they are not known."""
    if parameters is None:
        return [("memory", f"unknown: {config.model} is not a folder on this host")]
    snapshot = parameters * SIZE_BYTES[config.rollout.dtype]
    shares = config.rollout.dtype == config.learner.dtype  # then the learner computes with the snapshot
    return [
        ("parameters", f"{parameters / 1e6:.1f} M"),
        ("memory of snapshots", f"{config.weights.slots} × {mib(snapshot)} in shared memory"),
        ("memory of the learner", _learner(config.learner, parameters, computes_apart=not shares)),
        ("memory of a rollout", _rollout(config, snapshot)),
    ]


def role_memory(config: RunConfig, role: str, parameters: int | None) -> str:
    """What a reference or a critic needs."""
    if parameters is None:
        return "unknown: its model is not a folder on this host"
    if role == "reference":
        return mib(parameters * SIZE_BYTES[config.reference.dtype])
    return _trained(config.critic_settings(role), parameters, computes_apart=True)


def signal_memory(signal: Signal, parameters: int | None) -> str:
    """Parameters and size of a reward model in its dtype, and in the others."""
    if parameters is None:
        return f"{signal.model}, of unknown size"
    sizes = {dtype: f"{parameters * size / 2**20:.3g} MiB" for dtype, size in SIZE_BYTES.items()}
    own = f"{parameters / 1e6:.1f} M parameters, {sizes.pop(signal.dtype)} as {signal.dtype}"
    return f"{own} ({', '.join(f'{size} as {dtype}' for dtype, size in sizes.items())})"


def _learner(learner: Learner, parameters: int, *, computes_apart: bool) -> str:
    """As _trained; or of frozen weights, where an adapter is trained."""
    if learner.lora is None:
        return _trained(learner, parameters, computes_apart=computes_apart)
    frozen = mib(parameters * SIZE_BYTES[learner.dtype])
    return f"{frozen} of frozen weights, 16 bytes for each weight of the adapter, and activations"


def _trained(training: Training, parameters: int, *, computes_apart: bool) -> str:
    """float32 masters with gradient and AdamW's two moments, and weights and gradient in the compute dtype."""
    compute = SIZE_BYTES[training.dtype]
    return f"{mib(parameters * (4 + 4 + 8 + compute + compute * computes_apart))} and activations"


def _rollout(config: RunConfig, snapshot: int) -> str:
    if config.rollout.engine == "embedded":
        return "the keys and values of its samples; the weights are the snapshot's"
    copies = "2 × " if config.rollout.vllm.stage else ""
    return f"on a CPU {copies}{mib(snapshot)} of weights, and the keys and values of its samples"


def mib(size_bytes: int) -> str:
    """A size as a person reads it."""
    return f"{size_bytes / 2**20:.0f} MiB"


def count_parameters(folder: Path) -> int | None:
    """Values in the safetensors files of a model folder, from their headers; None where there are none."""
    return sum(_count(file) for file in folder.glob("*.safetensors")) or None


def _count(file: Path) -> int:
    """From the header: 8 bytes of length, then JSON."""
    with file.open("rb") as raw:
        header = json.loads(raw.read(int.from_bytes(raw.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")

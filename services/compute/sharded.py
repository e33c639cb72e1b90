"""A policy that several processes share, one shard of every parameter each (FSDP2): see backend.Backend.

All ranks call every method here at the same time, in the same order. What comes out is the same on all of them; what is
written or given to others is rank 0's to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from services.compute.device import wait_for
from services.compute.hf import HFBackend, checkpoint_gradients, load_model
from services.compute.lora import Adapter
from services.compute.packing import PackedRows
from shared.config import Learner


def _mesh(device: torch.device, copies: int) -> DeviceMesh:
    """All ranks: [copies, ranks of each], or one dimension where there is one copy."""
    size = dist.get_world_size()
    if copies == 1:
        return init_device_mesh(device.type, (size,))
    return init_device_mesh(device.type, (copies, size // copies), mesh_dim_names=("replicate", "shard"))


class _Root(torch.nn.Module):
    """Gives FSDP one place to gather what lies outside of the layers, whatever is computed there."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Any], *args: Any) -> Any:
        return compute(*args)


class ShardedBackend(HFBackend):
    """A causal LM whose float32 masters are shards; layers are gathered in the compute dtype when they are needed."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        training: Learner,
        tell: Callable[..., None],
        *,
        adapter: Adapter | None = None,
    ) -> None:
        """model: in float32, the same on all ranks. tell: has the other ranks call the method of a name, too.

        adapter: the one in the model, which is in the compute dtype then.
        """
        super().__init__(model, tokenizer, None, dtype=training.dtype, adapter=adapter)
        self._tell = tell
        if training.gradient_checkpointing:
            checkpoint_gradients(model)
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
        mesh = _mesh(self._device, training.copies)
        for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self._root: Any = fully_shard(_Root(model), mesh=mesh, mp_policy=policy)
        self._syncs_once = training.sync_once
        self._weights = dict(model.named_parameters())
        self.parameters = {name: weight for name, weight in self._weights.items() if weight.requires_grad}

    @classmethod
    def load_shards(
        cls,
        folder: str,
        training: Learner,
        tell: Callable[..., None],
        *,
        tokenizer: str | None = None,
        adapter: Path | None = None,
    ) -> ShardedBackend:
        """As `load` of HFBackend; every rank reads the files."""
        lora, own = training.lora, None
        dtype = "float32" if lora is None else training.dtype
        model, words, _ = load_model(AutoModelForCausalLM, folder, tokenizer, dtype)
        HFBackend(model, words, None, dtype=dtype).check(folder)
        if lora is not None:
            own = Adapter(model, lora, folder, adapter)
        return cls(model, words, training, tell, adapter=own)

    def logprobs(self, rows: PackedRows, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of this rank's rows and entropies there, [K] float32 each, with gradient."""
        found: tuple[torch.Tensor, torch.Tensor] = self._root(super().logprobs, rows, temperature)
        return found

    def score(self, tokens: list[int]) -> np.ndarray:
        """[T-1] float32 log-probs of tokens[1:] at temperature 1."""
        self._tell("score", tokens=tokens)
        with torch.no_grad():
            found: np.ndarray = self._root(super().score, tokens)
        return found

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Have this backward pass sum the gradients over the ranks, or keep them, whole, for the last one to do so."""
        self._root.set_requires_gradient_sync(is_last or not self._syncs_once)

    def collect_gradients(self) -> None:
        """The backward pass leaves them with the masters: it is only waited for."""
        wait_for(self._device)

    def use_snapshot(self, tensors: Mapping[str, torch.Tensor] | None) -> None:
        """Nothing to do: layers are computed with what the masters are cast to."""

    @torch.no_grad()
    def write_snapshot(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Gather the policy's weights one by one; into the tensors of a snapshot, where this rank has them."""
        self._tell("write_snapshot", tensors={})
        super().write_snapshot(tensors)

    def capture(self) -> Callable[[Path], None]:
        """Gather a copy of the masters, on rank 0; see backend.Backend."""
        self._tell("capture")
        return super().capture()

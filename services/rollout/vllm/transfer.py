"""Weights into vLLM's workers: an engine for vLLM's own weight-transfer interface, which loads shared snapshots.

vLLM imports this module in each of its workers, because `Extension` is named as their extension; that registers the
engine. Reading order: `Extension` (what may be called from outside) → `SnapshotTransfer` → `load`, `exchange`.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from services.rollout.vllm import BACKEND
from shared.errors import WeightsError
from shared.snapshot import Layout, SnapshotFile


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """stage: keep a second model in each worker, which new weights are loaded into while the first one generates."""

    stage: bool


@dataclasses.dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A snapshot; `tensors` and `size_bytes` as in `Manifest.to_wire`. number: of the swap, to know it again."""

    number: int
    file: str
    slot: int
    lineage: int
    version: int
    tensors: list[Any]
    size_bytes: int

    @property
    def layout(self) -> Layout:
        """Where each tensor lies in the slot."""
        return Layout({name: (dtype, tuple(shape), at) for name, dtype, shape, at in self.tensors}, self.size_bytes)


class SnapshotTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads snapshots into the model of one worker.

    Staged, a thread loads a snapshot into a spare model, whose weights are exchanged for those in use once generation
    is paused. Not staged, or where that snapshot was not staged, the pause lasts as long as the load.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._file: SnapshotFile | None = None
        self._spare: torch.nn.Module | None = None
        self._thread: threading.Thread | None = None
        self._staged: int | None = None
        self._fault: Exception | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Build the spare model, where there is to be one: on a GPU its memory would be dearer than the pause."""
        if init_info.stage and self.device.type == "cpu":
            self._spare = spare_model(self.model, self.vllm_config)

    def stage(self, info: UpdateInfo) -> None:
        """Begin to load a snapshot into the spare model."""
        if self._spare is not None:
            self._staged = self._fault = None
            self._thread = threading.Thread(target=self._stage, args=(info,), name="staging weights", daemon=True)
            self._thread.start()

    def is_staged(self) -> bool:
        """Whether the load has ended. Raises what it ended with."""
        if self._thread is not None and self._thread.is_alive():
            return False
        if self._fault is not None:
            raise self._fault
        return True

    def _stage(self, info: UpdateInfo) -> None:
        assert self._spare is not None
        try:
            self._load(self._spare, info)
            self._staged = info.number
        except Exception as error:  # whatever it is, who asks for the outcome must hear of it
            self._fault = error

    def start_weight_update(self) -> None:
        """Nothing: all is done in `receive_weights`, since a snapshot comes in one piece."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Use a snapshot from now on. Generation is paused. Raises WeightsError."""
        if self._spare is not None and self._staged == update_info.number:
            exchange(self.model, self._spare)
            self._staged = None
        else:
            self._load(self.model, update_info)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a snapshot, and wait until it is on the device."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Nothing: see `start_weight_update`."""

    def shutdown(self) -> None:
        """Let go of the snapshots and of the spare model."""
        if self._thread is not None:
            self._thread.join()
        self._file = self._spare = None

    def _load(self, model: torch.nn.Module, info: UpdateInfo) -> None:
        if self._file is None or self._file.path.name != info.file:
            self._file = SnapshotFile.attach(info.file, info.layout)
        load(model, self.model_config, self._file.tensors(info.slot))
        if not self._file.holds(info.slot, info.lineage, info.version):
            raise WeightsError(f"the snapshot of version {info.version} was overwritten while it was loaded")


class Extension:
    """What vLLM's workers can be asked for beside their own methods, by `collective_rpc`."""

    weight_transfer_engine: SnapshotTransfer
    model_runner: Any

    def warm_up(self) -> None:
        """What vLLM leaves out on a CPU where it does not compile: allocate what pipeline stages pass on in."""
        if self.model_runner.device.type == "cpu":
            self.model_runner.profile_run()

    def stage_weights(self, update_info: dict[str, Any]) -> None:
        """See SnapshotTransfer.stage."""
        self.weight_transfer_engine.stage(self.weight_transfer_engine.parse_update_info(update_info))

    def weights_are_staged(self) -> bool:
        """See SnapshotTransfer.is_staged."""
        return self.weight_transfer_engine.is_staged()


@torch.no_grad()
def load(model: torch.nn.Module, model_config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load tensors by their Hugging Face names, and have vLLM make of them what its kernels want.

    Raises WeightsError where a parameter of the model got no weights.
    """
    expected = {name for name, _ in model.named_parameters()}
    initialize_layerwise_reload(model)
    try:
        loaded = model.load_weights(tensors.items())  # type: ignore[operator]
    finally:
        finalize_layerwise_reload(model, model_config)
    # vLLM's reload does not see that a tied head has new weights: it would go on with those it packed before.
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
    missing = sorted(expected - set(loaded)) if loaded is not None else []
    if missing:
        raise WeightsError(f"the snapshot has no weights for {len(missing)} parameters of the model: {missing[:3]}")


def spare_model(model: torch.nn.Module, vllm_config: Any) -> torch.nn.Module:
    """A second model like this one, with weights of its own; nothing in it is known to vLLM's runner."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.load_config = dataclasses.replace(config.load_config, load_format="dummy")
    with set_current_vllm_config(config):
        spare: torch.nn.Module = get_model_loader(config.load_config).load_model(config, config.model_config)
    shared = set(model.modules())
    copies: dict[int, Any] = {}
    for parent in list(spare.modules()):  # vLLM shares rotary embeddings among models
        for name, child in parent._modules.items():
            if child in shared:
                parent._modules[name] = copy.deepcopy(child, copies)
    return spare


@torch.no_grad()
def exchange(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Exchange the weights of two models of one kind: each parameter stays what it is and points at other memory."""
    seen: set[int] = set()  # a tied weight is met twice
    twins = dict(other.named_modules(remove_duplicate=False))
    for path, mine in one.named_modules():
        theirs = twins[path]
        for name, parameter in mine._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            twin = theirs._parameters[name]
            assert twin is not None
            parameter.data, twin.data = twin.data, parameter.data
        if "cpu_linear" in mine.__dict__:  # weights as vLLM's CPU kernels want them live in a closure
            mine.cpu_linear, theirs.cpu_linear = theirs.cpu_linear, mine.cpu_linear


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SnapshotTransfer)

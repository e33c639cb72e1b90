"""A model's parameters as views on tensors that live elsewhere: a swap of weights that copies nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shared.errors import WeightsError


class Parameters:
    """The parameters of one model, by name. Names that share a tensor (a tied lm_head) stay tied."""

    def __init__(self, model: nn.Module) -> None:
        first: dict[int, str] = {}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._aliases: dict[str, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner, _, attribute = name.rpartition(".")
            canonical = first.setdefault(id(parameter), name)
            self._aliases[name] = canonical
            self._places.setdefault(canonical, []).append((model.get_submodule(owner), attribute))

    def point(self, tensors: dict[str, Any]) -> None:
        """Make every parameter a view on `tensors`, which must outlive the next call.

        Raises WeightsError, before anything is changed, where a name is missing or unknown or a tensor differs in
        shape or dtype.
        """
        given = {self._canonical(name): tensor for name, tensor in tensors.items()}
        if missing := sorted(self._places.keys() - given.keys()):
            raise WeightsError(f"new weights lack {len(missing)} of {len(self._places)} parameters, first {missing[0]}")
        for name, tensor in given.items():
            self._check(name, tensor)
        for name, tensor in given.items():
            parameter = nn.Parameter(tensor.detach(), requires_grad=False)
            for module, attribute in self._places[name]:
                module._parameters[attribute] = parameter

    def _canonical(self, name: str) -> str:
        if name not in self._aliases:
            raise WeightsError(f"new weights hold {name}, which the engine's model does not have")
        return self._aliases[name]

    def _check(self, name: str, tensor: Tensor) -> None:
        module, attribute = self._places[name][0]
        old = module._parameters[attribute]
        assert old is not None
        if (tensor.shape, tensor.dtype) != (old.shape, old.dtype):
            raise WeightsError(
                f"new weights of {name} are {tensor.dtype} {list(tensor.shape)}, "
                f"the engine's model has {old.dtype} {list(old.shape)}"
            )

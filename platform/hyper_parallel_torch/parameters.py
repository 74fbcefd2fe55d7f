"""Finding parameters, their local gradients and their layouts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from hyper_parallel.interface import LAYOUT_ATTRIBUTE, Description
from hyper_parallel_torch.layouts import ProcessGroups


class TorchParameters:
    """The ``Parameters`` role of the platform."""

    process_groups: ProcessGroups

    def parameters(self, source: Any) -> tuple[list[Tensor], list[str]]:
        if isinstance(source, torch.nn.Module):
            named = dict(source.named_parameters())
            return list(named.values()), list(named)
        if isinstance(source, Tensor):
            return [source], []
        if not isinstance(source, Iterable):
            raise TypeError(
                f"expected a torch module, tensor or iterable of tensors, got {_type_name(source)}"
            )
        tensors = list(source)
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"tensor {index} is a {_type_name(tensor)}, but the platform is torch, "
                    "which expects torch.Tensor"
                )
        return tensors, []

    def gradients(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None] | None
    ) -> tuple[list[Tensor | None], Sequence[Hashable]]:
        for gradient in gradients or ():
            if gradient is not None and not isinstance(gradient, Tensor):
                raise TypeError(
                    f"a gradient is a {_type_name(gradient)}, but the platform is torch, which expects torch.Tensor"
                )
        local: list[Tensor | None] = []
        signature: list[Hashable] = []
        for index, parameter in enumerate(parameters):
            gradient = _own_gradient(parameter) if gradients is None else gradients[index]
            if isinstance(gradient, DTensor):
                local.append(_waited(gradient._local_tensor))
                signature.append(gradient._spec)
            elif gradient is None and isinstance(parameter, DTensor) and parameter.requires_grad:
                local.append(None)
                signature.append(parameter._spec)  # most often that of its gradient: nothing to plan anew
            else:
                local.append(gradient)
                signature.append((parameter.requires_grad, _attached(parameter, gradient)))
        return local, signature

    def describe(self, parameter: Tensor, gradient: Tensor | None) -> Description:
        holder = gradient if gradient is not None else _own_gradient(parameter)
        if not isinstance(holder, DTensor) and isinstance(parameter, DTensor):
            local = parameter._local_tensor if holder is None else holder
            return self._describe_dtensor(parameter, local, parameter.requires_grad)
        if isinstance(holder, DTensor):
            return self._describe_dtensor(holder, holder._local_tensor, parameter.requires_grad)
        local_shape = tuple((parameter if holder is None else holder).shape)
        layout = _attached(parameter, gradient)
        global_shape = local_shape if layout is None else layout.global_shape
        return Description(local_shape, global_shape, layout, parameter.requires_grad)

    def carries_gradient(self, parameter: Tensor) -> bool:
        return parameter.requires_grad or _own_gradient(parameter) is not None

    def _describe_dtensor(self, tensor: DTensor, local: Tensor, requires_grad: bool) -> Description:
        layout = self.process_groups.layout(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape))
        return Description(tuple(local.shape), tuple(tensor.shape), layout, requires_grad)


def _own_gradient(parameter: Tensor) -> Tensor | None:
    """``main_grad`` (the wide gradient that Megatron-style optimizers consume), else ``grad``; none if frozen."""
    if not parameter.requires_grad:
        return None
    main_grad: Tensor | None = parameter.__dict__.get("main_grad")
    return parameter.grad if main_grad is None else main_grad


def _attached(parameter: Tensor, gradient: Tensor | None) -> Any:
    layout = parameter.__dict__.get(LAYOUT_ATTRIBUTE)
    return layout if layout is not None or gradient is None else gradient.__dict__.get(LAYOUT_ATTRIBUTE)


def _waited(local: Tensor) -> Tensor:
    """The plain tensor behind one that a collective may still be filling."""
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

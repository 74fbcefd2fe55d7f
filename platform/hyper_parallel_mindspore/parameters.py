"""Finding parameters, their local gradients and their layouts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from mindspore import Tensor, nn

from hyper_parallel.interface import Description
from hyper_parallel_mindspore.dtensor import attached_layout
from hyper_parallel_mindspore.process_groups import ProcessGroups


class MindSporeParameters:
    """The ``Parameters`` role of the platform.

    A layout is the parameter's, else the gradient's: MindSpore returns plain tensors as gradients, and operations
    drop what a tensor carries, but a parameter stays the same object.
    """

    process_groups: ProcessGroups

    def parameters(self, source: Any) -> tuple[list[Tensor], list[str]]:
        if isinstance(source, nn.Cell):
            named = dict(source.parameters_and_names())
            return list(named.values()), list(named)
        if isinstance(source, Tensor):
            return [source], []
        if not isinstance(source, Iterable):
            raise TypeError(
                f"expected a mindspore Cell, Tensor or iterable of tensors, got {_type_name(source)}"
            )
        tensors = list(source)
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"tensor {index} is a {_type_name(tensor)}, but the platform is mindspore, "
                    "which expects mindspore.Tensor"
                )
        return tensors, []

    def gradients(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None] | None
    ) -> tuple[list[Tensor | None], Sequence[Hashable]]:
        local = (
            list(gradients)
            if gradients is not None
            else [_own_gradient(parameter) for parameter in parameters]
        )
        signature = [
            (_requires_grad(parameter), _layout(parameter, gradient))
            for parameter, gradient in zip(parameters, local, strict=True)
        ]
        return local, signature

    def describe(self, parameter: Tensor, gradient: Tensor | None) -> Description:
        holder = gradient if gradient is not None else _own_gradient(parameter)
        # a gradient that is no tensor at all is an error that every rank raises, once all have met
        local_shape = tuple(getattr(holder, "shape", parameter.shape))
        layout = _layout(parameter, holder)
        if layout is None:
            return Description(local_shape, local_shape, None, _requires_grad(parameter))
        self.process_groups.note(layout.mesh)
        return Description(local_shape, layout.global_shape, layout, _requires_grad(parameter))

    def carries_gradient(self, parameter: Tensor) -> bool:
        return getattr(parameter, "requires_grad", False) or _own_gradient(parameter) is not None


def _own_gradient(parameter: Tensor) -> Tensor | None:
    """``main_grad``, else ``grad``, set on the parameter by a hook or a training loop; none if it is frozen."""
    if not _requires_grad(parameter):
        return None
    attributes = parameter.__dict__
    main_grad: Tensor | None = attributes.get("main_grad")
    return attributes.get("grad") if main_grad is None else main_grad


def _requires_grad(parameter: Tensor) -> bool:
    """Only a ``Parameter`` can be frozen; a plain tensor takes part."""
    return bool(getattr(parameter, "requires_grad", True))


def _layout(parameter: Tensor, gradient: Tensor | None) -> Any:
    layout = attached_layout(parameter)
    return layout if layout is not None or gradient is None else attached_layout(gradient)


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"

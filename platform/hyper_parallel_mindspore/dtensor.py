"""A tensor that knows which part of a global tensor it is: what PyTorch has as DTensor and MindSpore lacks."""

from __future__ import annotations

from typing import Any

from mindspore import Parameter, Tensor

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Placement
from hyper_parallel.interface import LAYOUT_ATTRIBUTE
from hyper_parallel_mindspore.device_mesh import DeviceMesh
from hyper_parallel_mindspore.shards import assembled


def attached_layout(tensor: Any) -> Layout | None:
    """The layout that a DTensor or a tensor given to ``attach_layout`` carries."""
    layout: Layout | None = getattr(tensor, "__dict__", {}).get(LAYOUT_ATTRIBUTE)
    return layout


class DTensor(Tensor):
    """This rank's part of a global tensor, sharing the memory of ``local``.

    It is a MindSpore tensor of the local shape: ``shape`` is that of the part, ``global_shape`` that of the whole, and
    an operation computes on the part and returns a plain tensor. ``Parameter(dtensor)`` is a DTensor, too, and unlike
    other parameters shares the memory of what it was made from; copies of either and pickles keep the layout.
    Gradients come back as plain tensors, and the parameter's layout counts for them.
    """

    def __new__(cls, local: Tensor, layout: Layout | None = None) -> DTensor:
        # Parameter(dtensor) calls this for a class of its own, with the DTensor alone
        layout = layout if layout is not None else attached_layout(local)
        if layout is None:
            raise ValueError("a DTensor needs a layout: use DTensor.from_local or distribute_tensor")
        self: DTensor = Tensor._make_subclass(cls, local)
        setattr(self, LAYOUT_ATTRIBUTE, layout)
        return self

    def __init__(self, local: Tensor, layout: Layout | None = None) -> None:
        """Do nothing: MindSpore's own would fill the tensor anew."""

    @property
    def layout(self) -> Layout:
        layout = attached_layout(self)
        assert layout is not None
        return layout

    @property
    def device_mesh(self) -> DeviceMesh:
        return DeviceMesh(self.layout.mesh)

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.layout.placements

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.layout.global_shape

    def to_local(self) -> Tensor:
        """This rank's part as a plain tensor on the same memory; no gradient flows through this call."""
        return Tensor._make_subclass(Tensor, self)

    def full_tensor(self) -> Tensor:
        """The global tensor, as a new plain tensor on every rank of the mesh.

        Collectives: one all-reduce, of the size of the global tensor, over the mesh.
        """
        return assembled(self.to_local(), self.layout)

    def __copy__(self) -> Tensor:
        return _restored(Tensor(self.asnumpy().copy()), self.layout, _parameter_options(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _restored, (Tensor(self), self.layout, _parameter_options(self))


def _parameter_options(tensor: DTensor) -> dict[str, Any] | None:
    if not isinstance(tensor, Parameter):
        return None
    names = ("name", "requires_grad", "layerwise_parallel", "parallel_optimizer")
    return {name: getattr(tensor, name) for name in names}


def _restored(local: Tensor, layout: Layout, options: dict[str, Any] | None) -> Tensor:
    dtensor = DTensor(local, layout)
    return dtensor if options is None else Parameter(dtensor, **options)

"""One way to build sharded tensors that is the same code on every backend; on torch it gives torch's own objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Placement, Shard, StridedShard
from hyper_parallel.interface import LAYOUT_ATTRIBUTE, SHARED_ATTRIBUTE, DeviceMesh, Tensor
from hyper_parallel.platforms import get_platform
from hyper_parallel.preparation import forget_layouts


def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """Arrange all ranks of the job, in order, in a mesh of ``mesh_shape``.

    Every rank calls it; on torch it is ``torch.distributed.device_mesh.init_device_mesh`` and creates one process
    group per mesh dim. Slice the result by name: ``mesh["dp"]``, ``mesh["dp", "tp"]``.

    Raises:
        ValueError, RuntimeError: the sizes do not multiply to the number of ranks.
    """
    names = None if mesh_dim_names is None else tuple(mesh_dim_names)
    return get_platform().init_device_mesh(device_type, tuple(mesh_shape), names)


def distribute_tensor(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """The DTensor of which this rank holds its shard of ``tensor``, the global tensor, alike on every rank.

    On torch, values come from the first rank of each mesh dim (one scatter or broadcast per dim); on MindSpore
    each rank cuts its own, without communication.
    """
    return get_platform().distribute_tensor(tensor, mesh, placements)


class _DTensorType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return get_platform().is_dtensor(instance)


class DTensor(metaclass=_DTensorType):
    """The selected backend's DTensor: ``isinstance`` works, and ``from_local`` builds one."""

    def __new__(cls) -> DTensor:
        raise TypeError("use DTensor.from_local or distribute_tensor")

    @staticmethod
    def from_local(
        local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int] | None = None
    ) -> Tensor:
        """The DTensor of which ``local`` is this rank's part; nothing is communicated or copied.

        Args:
            local: this rank's shard, copy or partial value.
            mesh: where it lies.
            placements: one per mesh dim, the core's or the framework's own.
            shape: the global shape; without it all shards are taken to be as large as this one.
        """
        return get_platform().dtensor_from_local(
            local, mesh, placements, None if shape is None else tuple(shape)
        )


def attach_layout(
    param: Any, mesh: DeviceMesh, placements: Sequence[Placement], global_shape: Sequence[int] | None = None
) -> Any:
    """Declare that the plain tensor ``param`` holds this rank's part of a global tensor; returns ``param``.

    The layout belongs to this object: on torch a ``copy.deepcopy`` of it has none.

    Args:
        param: a tensor or parameter of the framework that is no DTensor.
        mesh: a device mesh of the framework, or a ``Mesh``.
        placements: one per mesh dim.
        global_shape: without it all shards are taken to be as large as this one.

    Raises:
        ValueError: the placements do not fit the mesh or the tensor, or ``global_shape`` gives this rank another
            local shape than that of ``param``.
        TypeError: ``param`` is a DTensor, which has a layout of its own.
    """
    platform = get_platform()
    if platform.is_dtensor(param):
        raise TypeError("attach_layout: a DTensor has a layout of its own")
    local_shape = tuple(param.shape)
    shape = tuple(global_shape) if global_shape is not None else None
    layout = platform.layout(mesh, placements, shape if shape is not None else local_shape)
    if shape is None:
        layout = Layout(layout.mesh, layout.placements, even_global_shape(layout, local_shape))
    rank = platform.rank()
    if layout.mesh.coordinate(rank) is not None and layout.local_shape(rank) != local_shape:
        raise ValueError(
            f"attach_layout: global shape {layout.global_shape} with {layout.placements} puts a shard "
            f"of shape {layout.local_shape(rank)} on rank {rank}, but the tensor has {local_shape}"
        )
    setattr(param, LAYOUT_ATTRIBUTE, layout)
    forget_layouts()
    return param


def mark_shared(param: Any, key: str) -> Any:
    """Declare that several pipeline stages hold ``param`` under this ``key``; returns ``param``.

    A tied embedding on the first and the last stage, say. Its gradient, which the stages have summed already,
    then counts once, and is scaled on each of them. Only calls with ``pp_mesh`` look at it.

    Args:
        param: a tensor or parameter of the framework.
        key: the same on every stage that holds the parameter, and no other's.
    """
    setattr(param, SHARED_ATTRIBUTE, str(key))
    forget_layouts()
    return param


def even_global_shape(layout: Layout, local_shape: Sequence[int]) -> tuple[int, ...]:
    """The global shape if every shard is as large as ``local_shape``."""
    shape = list(local_shape)
    for size, placement in zip(layout.mesh.shape, layout.placements, strict=True):
        if isinstance(placement, Shard | StridedShard):
            shape[placement.dim] *= size
    return tuple(shape)

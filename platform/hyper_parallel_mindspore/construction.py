"""The portable constructors: meshes and sharded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor
from mindspore.communication import get_process_group_ranks

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Placement
from hyper_parallel.sharded_tensor import even_global_shape
from hyper_parallel_mindspore.device_mesh import DeviceMesh, arrange
from hyper_parallel_mindspore.dtensor import DTensor
from hyper_parallel_mindspore.process_groups import ProcessGroups, rank
from hyper_parallel_mindspore.shards import cut


class MindSporeConstruction:
    """The ``Construction`` and ``Conversion`` roles of the platform."""

    process_groups: ProcessGroups

    def init_device_mesh(
        self, device_type: str, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...] | None
    ) -> DeviceMesh:
        return arrange(device_type, mesh_shape, mesh_dim_names)

    def distribute_tensor(
        self, tensor: Tensor, mesh: DeviceMesh | Mesh, placements: Sequence[Placement]
    ) -> DTensor:
        layout = self.layout(mesh, placements, tuple(tensor.shape))
        return DTensor(cut(tensor, layout), layout)

    def dtensor_from_local(
        self,
        local: Tensor,
        mesh: DeviceMesh | Mesh,
        placements: Sequence[Placement],
        shape: tuple[int, ...] | None,
    ) -> DTensor:
        """Share the memory of ``local``.

        Raises:
            ValueError: ``shape`` puts a part of another shape on this rank.
        """
        local_shape = tuple(local.shape)
        layout = self.layout(mesh, placements, local_shape if shape is None else shape)
        if shape is None:
            layout = Layout(layout.mesh, layout.placements, even_global_shape(layout, local_shape))
        if layout.mesh.coordinate(rank()) is not None and layout.local_shape(rank()) != local_shape:
            raise ValueError(
                f"DTensor.from_local: global shape {layout.global_shape} with {layout.placements} puts a "
                f"part of shape {layout.local_shape(rank())} on rank {rank()}, but the tensor has {local_shape}"
            )
        return DTensor(local, layout)

    def from_numpy(self, array: Any, dtype: str, device_type: str) -> Tensor:
        # Narrowed by NumPy, as an NPU may know no float64.
        wide = np.float64 if dtype == "float64" else np.float32
        return Tensor(np.array(array, wide)).astype(getattr(mindspore, dtype))

    def to_numpy(self, tensor: Tensor) -> Any:
        wide = tensor if tensor.dtype == mindspore.float64 else tensor.astype(mindspore.float32)
        return wide.asnumpy().astype(np.float64)

    def parameter(self, tensor: Tensor) -> Parameter:
        return Parameter(tensor)

    def is_dtensor(self, value: Any) -> bool:
        return isinstance(value, DTensor)

    def mesh(self, mesh: DeviceMesh | Mesh | str) -> Mesh:
        """The core's mesh of a device mesh or of the name of a communication group, after noting its slices."""
        if isinstance(mesh, str):
            ranks = tuple(sorted(get_process_group_ranks(mesh)))
            core = Mesh((len(ranks),), ranks)
        else:
            core = mesh.core if isinstance(mesh, DeviceMesh) else mesh
        if not isinstance(core, Mesh):
            raise TypeError(f"expected a DeviceMesh, a Mesh or the name of a group, got {mesh!r}")
        self.process_groups.note(core)
        return core

    def layout(
        self, mesh: DeviceMesh | Mesh | str, placements: Sequence[Placement], global_shape: tuple[int, ...]
    ) -> Layout:
        return Layout(self.mesh(mesh), tuple(placements), tuple(global_shape))

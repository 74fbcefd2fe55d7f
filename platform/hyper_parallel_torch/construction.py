"""The portable constructors, which give torch's own objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel_torch.layouts import ProcessGroups, core_placement, torch_placement


class TorchConstruction:
    """The ``Construction`` and ``Conversion`` roles of the platform."""

    process_groups: ProcessGroups

    def init_device_mesh(
        self, device_type: str, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...] | None
    ) -> DeviceMesh:
        return init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names)

    def distribute_tensor(self, tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> DTensor:
        return distribute_tensor(tensor, mesh, [torch_placement(p) for p in placements])

    def dtensor_from_local(
        self, local: Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: tuple[int, ...] | None
    ) -> DTensor:
        size = None if shape is None else torch.Size(shape)
        stride = None if shape is None else torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, mesh, [torch_placement(p) for p in placements], run_check=False, shape=size, stride=stride
        )

    def from_numpy(self, array: Any, dtype: str, device_type: str) -> Tensor:
        return torch.as_tensor(array).to(device=device_type, dtype=getattr(torch, dtype))

    def to_numpy(self, tensor: Tensor) -> Any:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        return local.detach().to(device="cpu", dtype=torch.float64).numpy()

    def parameter(self, tensor: Tensor) -> Tensor:
        return torch.nn.Parameter(tensor)

    def is_dtensor(self, value: Any) -> bool:
        return isinstance(value, DTensor)

    def mesh(self, mesh: Any) -> Mesh:
        return mesh if isinstance(mesh, Mesh) else self.process_groups.mesh(mesh)

    def layout(
        self, mesh: DeviceMesh | Mesh, placements: Sequence[Any], global_shape: tuple[int, ...]
    ) -> Layout:
        if isinstance(mesh, Mesh):
            return Layout(mesh, tuple(map(core_placement, placements)), global_shape)
        return self.process_groups.layout(mesh, tuple(placements), global_shape)

"""Between torch's meshes, placements and DTensor specs and those of the core; and the process groups of the meshes.

``_StridedShard``, ``_get_root_mesh``, ``_mesh_resources``, ``_spec`` and ``_local_tensor`` have no public names in torch;
they are used here and in ``parameters`` only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import placement_types as torch_placements

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard, StridedShard

# torch's reduce ops of Partial, by the core's names; the strided entries come first as they subclass Shard in places
_TO_CORE: tuple[tuple[type, Callable[[Any], Placement]], ...] = (
    (torch_placements._StridedShard, lambda p: StridedShard(p.dim, split_factor=int(p.split_factor))),
    (torch_placements.Shard, lambda p: Shard(p.dim)),
    (torch_placements.Replicate, lambda p: Replicate()),
    (torch_placements.Partial, lambda p: Partial(p.reduce_op)),
)
_TO_TORCH: dict[type, Callable[[Any], Any]] = {
    StridedShard: lambda p: torch_placements._StridedShard(p.dim, split_factor=p.split_factor),
    Shard: lambda p: torch_placements.Shard(p.dim),
    Replicate: lambda p: torch_placements.Replicate(),
    Partial: lambda p: torch_placements.Partial(p.reduce_op),
}


def core_placement(placement: Any) -> Any:
    """The core's placement; what is none of torch's is returned as it is."""
    return next((build(placement) for kind, build in _TO_CORE if isinstance(placement, kind)), placement)


def torch_placement(placement: Any) -> Any:
    """Torch's placement; what is none of the core's is returned as it is."""
    build = _TO_TORCH.get(type(placement))
    return placement if build is None else build(placement)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that torch sliced this one from, or itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    root: DeviceMesh = device_mesh._mesh_resources.get_root_mesh(mesh)  # before torch 2.10
    return root


def core_mesh(mesh: DeviceMesh) -> Mesh:
    """The core's mesh, with the root that torch sliced it from."""
    root = root_mesh(mesh)
    return _core_mesh(mesh, None if root is mesh or root == mesh else core_mesh(root))


@lru_cache(maxsize=256)
def _core_mesh(mesh: DeviceMesh, root: Mesh | None) -> Mesh:
    # To torch, a mesh and a slice of another one may be equal.
    names = mesh.mesh_dim_names
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    return Mesh(tuple(mesh.shape), ranks, None if names is None else tuple(names), root)


@lru_cache(maxsize=65536)
def _core_layout(mesh: Mesh, placements: tuple[Any, ...], global_shape: tuple[int, ...]) -> Layout:
    return Layout(mesh, tuple(map(core_placement, placements)), global_shape)


class ProcessGroups:
    """The process groups of the world and of the mesh dims seen so far, by sorted ranks.

    Only groups that exist are used, as creating one is a collective of the whole world.
    """

    def __init__(self) -> None:
        self._world: Any = None
        self._groups: dict[tuple[int, ...], Any] = {}
        self._noted: set[DeviceMesh] = set()
        self._device_types: tuple[str, ...] = ()

    def known(self) -> dict[tuple[int, ...], Any]:
        """The groups of the current job; a new process group starts anew."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not self._world:
            self._world = world
            self._groups = {} if world is None else {tuple(range(dist.get_world_size())): world}
            self._noted = set()
            self._device_types = () if world is None else tuple(d.type for d in world._device_types)
        return self._groups

    def device_types(self) -> tuple[str, ...]:
        """The kinds of devices that the group of the world serves."""
        self.known()
        return self._device_types

    def layout(self, mesh: DeviceMesh, placements: tuple[Any, ...], global_shape: tuple[int, ...]) -> Layout:
        """The core's layout, after noting the groups of the mesh and of its root."""
        return _core_layout(self.mesh(mesh), placements, global_shape)

    def mesh(self, mesh: DeviceMesh | dist.ProcessGroup) -> Mesh:
        """The core's mesh of a device mesh or a process group, after noting its groups."""
        if isinstance(mesh, DeviceMesh):
            for each in (mesh, root_mesh(mesh)):
                self._note(each)
            return core_mesh(mesh)
        ranks = tuple(sorted(dist.get_process_group_ranks(mesh)))
        self.known().setdefault(ranks, mesh)
        return Mesh((len(ranks),), ranks)

    def _note(self, mesh: DeviceMesh) -> None:
        if mesh.get_coordinate() is None or not dist.is_initialized():
            return
        known = self.known()
        if mesh in self._noted:  # every parameter comes by, and a mesh dim may have many thousand ranks
            return
        rank, whole = dist.get_rank(), core_mesh(mesh)
        for mesh_dim in range(mesh.ndim):
            ranks = tuple(sorted(whole.slice_ranks(rank, (mesh_dim,))))
            if ranks not in known:
                known[ranks] = mesh.get_group(mesh_dim)
        self._noted.add(mesh)

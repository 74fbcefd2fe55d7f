"""The ranks of a job arranged in an n-dimensional array, with the interface of PyTorch's DeviceMesh."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from hyper_parallel.core.mesh import Mesh
from hyper_parallel_mindspore.process_groups import group_name, rank, world_size


def arrange(device_type: str, shape: tuple[int, ...], dim_names: tuple[str, ...] | None) -> DeviceMesh:
    """All ranks, in order, in a mesh of ``shape``.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks, or the names are not as many or not distinct.
    """
    if any(size < 1 for size in shape) or prod(shape) != world_size():
        raise ValueError(
            f"init_device_mesh: mesh_shape {shape} holds {prod(shape)} ranks, but the job has {world_size()}"
        )
    if dim_names is not None and len(set(dim_names)) != len(dim_names):
        raise ValueError(f"init_device_mesh: mesh_dim_names must be distinct, got {dim_names}")
    return DeviceMesh(Mesh(shape, tuple(range(world_size())), dim_names), device_type)


class DeviceMesh:
    """A mesh, seen from this rank. ``core`` is the neutral ``Mesh``, whose ``root`` is the mesh it was sliced from.

    Meshes are equal if their ``core`` is.
    """

    __slots__ = ("core", "device_type")

    def __init__(self, core: Mesh, device_type: str = "") -> None:
        self.core = core
        self.device_type = device_type

    @property
    def shape(self) -> tuple[int, ...]:
        return self.core.shape

    @property
    def ndim(self) -> int:
        return self.core.ndim

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        return self.core.dim_names

    def size(self, mesh_dim: int | str | None = None) -> int:
        """The number of ranks, or of those along one mesh dim."""
        return self.core.size if mesh_dim is None else self.shape[self._dim(mesh_dim)]

    def get_rank(self) -> int:
        """This process's global rank."""
        return rank()

    def get_coordinate(self) -> list[int] | None:
        """Where this rank stands, or None if it is not a member."""
        coordinate = self.core.coordinate(rank())
        return None if coordinate is None else list(coordinate)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's position along a mesh dim, which may be left out for a mesh of one dim."""
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"rank {rank()} is not in the mesh of ranks {self.core.ranks}")
        return coordinate[self._dim(mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> str:
        """The name of the communication group along a mesh dim; the first call creates it on its members."""
        return group_name(tuple(sorted(self.core.slice_ranks(rank(), (self._dim(mesh_dim),)))))

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The slice along the named mesh dims that this rank is in.

        Raises:
            KeyError: a name is unknown, or the names are not in the order of the mesh.
            RuntimeError: this rank is not in the mesh.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        dims = self._dims(wanted)
        if self.core.coordinate(rank()) is None:
            raise RuntimeError(f"rank {rank()} is not in the mesh of ranks {self.core.ranks}")
        if len(dims) == self.ndim:
            return self
        ranks = self.core.slice_ranks(rank(), dims)
        shape = tuple(self.shape[dim] for dim in dims)
        return DeviceMesh(Mesh(shape, ranks, wanted, self.core.root or self.core), self.device_type)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMesh) and self.core == other.core

    def __hash__(self) -> int:
        return hash(self.core)

    def __repr__(self) -> str:
        axes = ", ".join(
            f"{name}={size}"
            for name, size in zip(self.core.dim_names or range(self.ndim), self.shape, strict=True)
        )
        return f"DeviceMesh({axes}; ranks {self.core.ranks})"

    def _dims(self, names: Iterable[str]) -> tuple[int, ...]:
        known = self.core.dim_names or ()
        missing = [name for name in names if name not in known]
        if missing:
            raise KeyError(f"the mesh has dims {known}, not {missing}")
        dims = tuple(known.index(name) for name in names)
        if not dims or list(dims) != sorted(set(dims)):
            raise KeyError(
                f"name at least one mesh dim, each once and in the order {known}; got {tuple(names)}"
            )
        return dims

    def _dim(self, mesh_dim: int | str | None) -> int:
        if isinstance(mesh_dim, str):
            return self._dims((mesh_dim,))[0]
        if mesh_dim is None:
            if self.ndim != 1:
                raise RuntimeError(f"a mesh of {self.ndim} dims needs the mesh_dim to be named")
            return 0
        return range(self.ndim)[mesh_dim]

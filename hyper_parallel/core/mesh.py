"""A mesh: ranks arranged in an n-dimensional array, and the root mesh that it is a slice of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in row-major order over ``shape``, for instance ``Mesh((2, 2), (0, 1, 2, 3), ("dp", "tp"))``.

    ``root`` is the mesh this one was sliced from. It tells which other ranks hold the sister slices, which no
    slice can know by itself: ``("dp",)`` of the mesh above is ``(0, 2)`` on rank 0 and ``(1, 3)`` on rank 1.

    The hash is taken once: every layout has a mesh, and a mesh may have many thousand ranks.

    Raises:
        ValueError: the sizes do not fit, a rank is named twice, or the names are not as many as dimensions.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    dim_names: tuple[str, ...] | None = None
    root: Mesh | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if prod(self.shape) != len(self.ranks) or not self.ranks:
            raise ValueError(
                f"Mesh: shape {self.shape} needs {prod(self.shape)} ranks (at least 1), got {len(self.ranks)}"
            )
        if len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"Mesh: a rank appears twice in {self.ranks}")
        if self.dim_names is not None and len(self.dim_names) != len(self.shape):
            raise ValueError(f"Mesh: {len(self.shape)} dimensions but names {self.dim_names}")
        object.__setattr__(self, "_hash", hash((self.shape, self.ranks, self.dim_names, self.root)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Mesh], tuple[object, ...]]:
        # Names hash differently in each process.
        return Mesh, (self.shape, self.ranks, self.dim_names, self.root)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where ``rank`` stands in the mesh, or None if it is not a member."""
        return _coordinates(self).get(rank)

    def slice_ranks(self, rank: int, mesh_dims: Collection[int]) -> tuple[int, ...]:
        """The ranks reached from ``rank`` by moving along ``mesh_dims`` only, in mesh order.

        Raises:
            ValueError: ``rank`` is not a member.
        """
        return _slice(self, rank, frozenset(mesh_dims))

    def spanned_dims(self, ranks: Collection[int]) -> tuple[int, ...] | None:
        """The mesh dims along which ``ranks`` lie, if they are one whole slice of this mesh, else None."""
        found = list(map(_coordinates(self).get, ranks))
        coordinates = [coordinate for coordinate in found if coordinate is not None]
        if len(coordinates) != len(found):
            return None
        dims = tuple(d for d in range(self.ndim) if len({coordinate[d] for coordinate in coordinates}) > 1)
        return dims if prod(self.shape[d] for d in dims) == len(coordinates) else None


@lru_cache(maxsize=256)
def _coordinates(mesh: Mesh) -> dict[int, tuple[int, ...]]:
    return dict(zip(mesh.ranks, product(*(range(size) for size in mesh.shape)), strict=True))


@lru_cache(maxsize=256)
def _slice(mesh: Mesh, rank: int, mesh_dims: frozenset[int]) -> tuple[int, ...]:
    here = mesh.coordinate(rank)
    if here is None:
        raise ValueError(f"rank {rank} is not in the mesh of ranks {mesh.ranks}")
    indices = [0]
    for dim, size in enumerate(mesh.shape):
        along = range(size) if dim in mesh_dims else (here[dim],)
        indices = [index * size + position for index in indices for position in along]
    return tuple(mesh.ranks[index] for index in indices)

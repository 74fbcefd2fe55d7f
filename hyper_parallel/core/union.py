"""Which ranks finish a norm together, and through which groups.

The set must be closed: the same on each of its members, though every rank finds it by itself, from the meshes of
its own tensors. Rank 0 with a tensor on tp = (0, 1) and one on dp = (0, 2) sees {0, 1, 2}, rank 1 sees {0, 1, 3}.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hyper_parallel.core.mesh import Mesh

Ranks = tuple[int, ...]
Groups = frozenset[Ranks]


@dataclass(frozen=True, slots=True)
class Union:
    """Sorted ranks; ``steps`` are the groups of this rank, one all-reduce each, none for a rank alone."""

    ranks: Ranks
    steps: tuple[Ranks, ...]


def closed_union(meshes: Iterable[Mesh], rank: int, groups: Groups) -> Union | None:
    """The ranks of all ``meshes`` if that set is closed, else None.

    It is closed when one mesh covers the others, as all its members share it, and when all meshes are slices of
    one root: then it is the slice of the root along the mesh dims that any of them spans.
    """
    meshes = tuple(meshes)
    if not meshes:
        return Union((rank,), ())
    ranks = {member for mesh in meshes for member in mesh.ranks}
    for mesh in meshes:
        if len(ranks) == mesh.size:
            return mesh_union(mesh, rank, groups)
    roots = {mesh.root or mesh for mesh in meshes}
    root = next(iter(roots))
    spans = [root.spanned_dims(mesh.ranks) for mesh in meshes]
    if len(roots) > 1 or None in spans:
        return None
    return mesh_union(root, rank, groups, {d for span in spans for d in span or ()})


def mesh_union(mesh: Mesh, rank: int, groups: Groups, mesh_dims: Iterable[int] | None = None) -> Union:
    """The slice of ``mesh`` through ``rank`` along ``mesh_dims`` (None: all), at once or one mesh dim after another."""
    mesh_dims = sorted(range(mesh.ndim) if mesh_dims is None else mesh_dims)
    ranks = tuple(sorted(mesh.slice_ranks(rank, mesh_dims)))
    if len(ranks) == 1:
        return Union(ranks, ())
    if ranks in groups:
        return Union(ranks, (ranks,))
    lines = (tuple(sorted(mesh.slice_ranks(rank, (d,)))) for d in mesh_dims)
    return Union(ranks, tuple(line for line in lines if len(line) > 1))

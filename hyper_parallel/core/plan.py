"""The reduction plan: what each rank contributes to the norm, and the all-reduces that finish it.

A plan is built from metadata alone, without communication, and is the same on every rank up to the rank's own
place in it. Usually it has one part: one packed buffer, one all-reduce over the union of all ranks involved.

Copies. Of ``W`` ranks in a part, ``W / D`` hold each of the ``D`` chunks of a tensor. Each rank contributes its
chunk's statistic times ``D``, and the sum over all ranks, divided by ``W``, is the sum over the chunks. All copies
contribute, so that a NaN on any of them is seen; integer weights keep counts exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import Mesh

DIGEST_BITS = 24


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What the plan knows of one tensor; ``layout`` None is a plain tensor, replicated over the ranks involved."""

    name: str
    global_shape: tuple[int, ...]
    layout: Layout | None

    def __str__(self) -> str:
        if self.layout is None:
            return f"{self.name}: shape {self.global_shape}, replicated"
        mesh = self.layout.mesh
        axes = dict(zip(mesh.dim_names or range(mesh.ndim), mesh.shape, strict=True))
        return f"{self.name}: shape {self.global_shape}, {self.layout.placements} on mesh {axes}"


@dataclass(frozen=True, slots=True)
class Part:
    """One packed buffer: its all-reduces run over ``steps`` in turn (none: this rank alone).

    ``terms`` are (weight, tensor indices); the reduced sum is divided by ``divisor``. ``copies`` are
    (tensor index, slot) of the tensors that several ranks hold alike: equal slots are copies of one chunk.
    ``errors`` are what this rank alone can see to be wrong; they travel with the buffer, so that all ranks raise.
    """

    ranks: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    terms: tuple[tuple[int, tuple[int, ...]], ...]
    divisor: int
    copies: tuple[tuple[int, int], ...]
    num_slots: int
    tensors: tuple[TensorMeta, ...]
    digest: int
    errors: tuple[str, ...]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(sorted(index for _, indices in self.terms for index in indices))


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """The parts whose statistics, combined on each rank, give the total; ordered alike on every rank."""

    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class _Union:
    """Ranks that finish together: ``steps`` are the groups of this rank, one all-reduce each."""

    ranks: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]


def digest_bits(text: str) -> int:
    """A number of ``DIGEST_BITS`` bits, the same in every process (unlike ``hash``)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=DIGEST_BITS // 8).digest(), "big")


@lru_cache(maxsize=64)
def build_plan(
    tensors: tuple[TensorMeta, ...], rank: int, groups: frozenset[tuple[int, ...]]
) -> ReductionPlan:
    """Plan the norm of ``tensors`` as seen from ``rank``.

    Args:
        tensors: the tensors that take part, in the same order on every rank.
        rank: this process's global rank.
        groups: the rank tuples that a process group exists for; the others are reached one mesh dim after another.

    Raises:
        NotImplementedError: a tensor is ``Partial`` on some mesh dim.
    """
    for meta in tensors:
        if meta.layout is not None and meta.layout.partial_dims:
            raise NotImplementedError(
                f"gradient {meta.name} is {meta.layout.placements}: Partial gradients "
                "are not supported yet; redistribute it to Shard or Replicate first"
            )
    mine = [i for i, meta in enumerate(tensors) if meta.layout is None or meta.layout.mesh.coordinate(rank)]
    meshes = dict.fromkeys(layout.mesh for i in mine if (layout := tensors[i].layout) is not None)
    union = _closed_union(tuple(meshes), rank, groups)
    if union is not None:
        return ReductionPlan((_part(mine, tensors, rank, union),))
    return ReductionPlan(tuple(_part_per_mesh(mine, tensors, rank, groups)))


def _closed_union(meshes: tuple[Mesh, ...], rank: int, groups: frozenset[tuple[int, ...]]) -> _Union | None:
    """The ranks involved, if every one of them finds the same set by itself, else None.

    That is so when one mesh covers the others, as all its members share it, and when all meshes are slices of
    one root: then it is the slice of the root along the mesh dims that any of them spans.
    """
    if not meshes:
        return _Union((rank,), ())
    ranks = {member for mesh in meshes for member in mesh.ranks}
    for mesh in meshes:
        if len(ranks) == mesh.size:
            return _union(mesh, rank, tuple(range(mesh.ndim)), groups)
    roots = {mesh.root or mesh for mesh in meshes}
    root = next(iter(roots))
    spans = [root.spanned_dims(mesh.ranks) for mesh in meshes]
    if len(roots) > 1 or None in spans:
        return None
    return _union(root, rank, tuple(sorted({d for span in spans for d in span or ()})), groups)


def _union(mesh: Mesh, rank: int, mesh_dims: tuple[int, ...], groups: frozenset[tuple[int, ...]]) -> _Union:
    ranks = tuple(sorted(mesh.slice_ranks(rank, mesh_dims)))
    if len(ranks) == 1:
        return _Union(ranks, ())
    if ranks in groups:
        return _Union(ranks, (ranks,))
    lines = (tuple(sorted(mesh.slice_ranks(rank, (d,)))) for d in mesh_dims)
    return _Union(ranks, tuple(line for line in lines if len(line) > 1))


def _part_per_mesh(
    mine: Sequence[int], tensors: tuple[TensorMeta, ...], rank: int, groups: frozenset[tuple[int, ...]]
) -> Iterable[Part]:
    """Without a closed union each set of ranks finishes on its own; sorting by ranks avoids a deadlock."""
    meshes: dict[tuple[int, ...], Mesh] = {}
    members: dict[tuple[int, ...], list[int]] = {}
    for i in mine:
        layout = tensors[i].layout
        ranks = tuple(sorted(layout.mesh.ranks)) if layout is not None else (rank,)
        members.setdefault(ranks, []).append(i)
        if layout is not None:
            meshes.setdefault(ranks, layout.mesh)
    for ranks, indices in sorted(members.items()):
        mesh = meshes.get(ranks, Mesh((1,), (rank,)))
        yield _part(indices, tensors, rank, _union(mesh, rank, tuple(range(mesh.ndim)), groups))


def _part(indices: Sequence[int], tensors: tuple[TensorMeta, ...], rank: int, union: _Union) -> Part:
    size = len(union.ranks)
    chunks = {i: layout.num_chunks if (layout := tensors[i].layout) is not None else 1 for i in indices}
    unit = gcd(size, *chunks.values())
    terms: dict[int, list[int]] = {}
    copies, slot = [], 0
    for i, number in chunks.items():
        terms.setdefault(number // unit, []).append(i)
        if number < size:
            layout = tensors[i].layout
            copies.append((i, slot + (layout.chunk(rank) if layout is not None else 0)))
            slot += number
    metas = tuple(tensors[i] for i in indices)
    return Part(
        union.ranks,
        union.steps,
        tuple((w, tuple(members)) for w, members in terms.items()),
        size // unit,
        tuple(copies),
        slot,
        metas,
        digest_bits(f"{union.ranks}" + "\n".join(map(str, metas))),
        tuple(_misfits(metas, union)),
    )


def _misfits(metas: Iterable[TensorMeta], union: _Union) -> Iterable[str]:
    for meta in metas:
        if meta.layout is not None and len(union.ranks) % meta.layout.mesh.size:
            yield (
                f"{meta.name} lies on a mesh of {meta.layout.mesh.size} ranks, which cannot have sister "
                f"meshes on all of the {len(union.ranks)} ranks {union.ranks} that clip together"
            )

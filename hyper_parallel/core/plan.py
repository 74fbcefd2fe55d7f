"""The reduction plan: what each rank contributes to the norm, and the collectives that finish it.

A plan is built from metadata alone, without communication, and is the same on every rank up to the rank's own
place in it. Usually it has one part: one packed buffer, one all-reduce over all ranks involved.

Copies. Of ``W`` ranks that hold a tensor, ``W / D`` hold each of its ``D`` pieces. Each rank contributes its
piece's statistic times ``D``, and the sum over all ranks, divided by ``W``, is the sum over the pieces. All copies
contribute, so that a NaN on any of them is seen; integer weights keep counts exact.

Partial. Values are reduced before their norm: one reduce-scatter per mesh dim leaves each rank of that dim with
another piece, so that ``D`` counts these ranks too.

Pipeline stages hold different tensors, and their statistics add up. If the mesh of the stages has a root, one
all-reduce over the whole root does it: a tensor has copies on every rank of its stage, and of no other. Else
the stage finishes first, and a last part combines the stages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Partial
from hyper_parallel.core.union import Groups, Ranks, Union, closed_union, mesh_union

DIGEST_BITS = 24


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What the plan knows of one tensor.

    ``layout`` None is a plain tensor, replicated over the ranks involved. ``shared`` is the key under which
    several pipeline stages hold this tensor.
    """

    name: str
    global_shape: tuple[int, ...]
    layout: Layout | None
    shared: str | None = None

    def __str__(self) -> str:
        if self.layout is None:
            return f"{self.name}: shape {self.global_shape}, replicated"
        mesh = self.layout.mesh
        axes = dict(zip(mesh.dim_names or range(mesh.ndim), mesh.shape, strict=True))
        return f"{self.name}: shape {self.global_shape}, {self.layout.placements} on mesh {axes}"

    @property
    def num_chunks(self) -> int:
        """How many different areas the ranks hold."""
        return 1 if self.layout is None else self.layout.num_chunks

    def pieces(self) -> int:
        """How many ranks contribute different statistics."""
        if self.layout is None:
            return 1
        return self.num_chunks * prod(self.layout.mesh.shape[d] for d in self.layout.partial_dims)


@dataclass(frozen=True, slots=True)
class Term:
    """Tensors whose statistic counts ``weight`` times (0: it is another rank's to count); divided by the number of stages that share them, if any do."""

    weight: int
    indices: tuple[int, ...]
    shared: str | None = None


@dataclass(frozen=True, slots=True)
class Reduction:
    """Partial tensors that are reduced alike before their statistic is taken.

    ``chain`` are (ranks in mesh order, reduce op), one reduce-scatter after another; ``numels`` are the local sizes,
    which are the same on all ranks of the chain.
    """

    chain: tuple[tuple[Ranks, str], ...]
    term: Term
    numels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One packed buffer: its all-reduces run over ``steps`` in turn (none: this rank alone).

    The reduced sum is divided by ``divisor``. ``copies`` are (tensor index, slot) of the tensors that several
    ranks hold alike, equal slots being copies of one piece; they are counted over ``copy_steps``. ``tensors`` are
    in the order of their indices. ``digest`` is the same on all ranks of the part, ``own_digest`` on those of one
    ``stage``, of which ``num_stages`` meet here. ``strict``: a gradient on some copies only is an error.
    ``errors`` are what this rank alone can see to be wrong; they travel with the buffer, so that all ranks raise.
    """

    steps: tuple[Ranks, ...]
    terms: tuple[Term, ...]
    reductions: tuple[Reduction, ...]
    divisor: int
    copies: tuple[tuple[int, int], ...]
    num_slots: int
    copy_steps: tuple[Ranks, ...]
    indices: tuple[int, ...]
    tensors: tuple[TensorMeta, ...]
    digest: int
    own_digest: int
    errors: tuple[str, ...]
    stage: int = 0
    num_stages: int = 1
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """The parts whose statistics, combined on each rank, give the total of the rank's stage or of all stages.

    ``last`` combines the stages where no part does. ``stage`` is this rank's own, and ``stage_steps`` lead to a
    rank of every stage. Parts are ordered alike on every rank.
    """

    parts: tuple[Part, ...]
    last: Part | None = None
    stage: int = 0
    stage_steps: tuple[Ranks, ...] = ()

    @property
    def communicates(self) -> bool:
        """Whether other ranks are involved."""
        return self.last is not None or any(part.steps for part in self.parts)

    @property
    def alike(self) -> bool:
        """Whether one exchange finishes the norm, between ranks that hold the same tensors."""
        return len(self.parts) == 1 and self.last is None and self.parts[0].num_stages == 1

    @property
    def shared(self) -> tuple[str, ...]:
        """The keys of the tensors that other stages may hold too."""
        return tuple(
            sorted({meta.shared for part in self.parts for meta in part.tensors if meta.shared is not None})
        )


def digest_bits(text: str) -> int:
    """A number of ``DIGEST_BITS`` bits, the same in every process (unlike ``hash``)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=DIGEST_BITS // 8).digest(), "big")


@lru_cache(maxsize=64)
def build_plan(
    tensors: tuple[TensorMeta, ...], rank: int, groups: Groups, pipeline: Mesh | None = None
) -> ReductionPlan:
    """Plan the norm of ``tensors`` as seen from ``rank``.

    Args:
        tensors: the tensors that take part, in the same order on every rank of a stage.
        rank: this process's global rank.
        groups: the rank tuples that a process group exists for; others are reached one mesh dim after another.
        pipeline: the mesh of the stages, of which ``rank`` is a member.

    Raises:
        ValueError: ``rank`` is not in ``pipeline``.
    """
    layouts = [meta.layout for meta in tensors]
    mine = [
        i for i, layout in enumerate(layouts) if layout is None or layout.mesh.coordinate(rank) is not None
    ]
    if pipeline is None:
        return ReductionPlan(tuple(_parts(mine, tensors, rank, groups)))
    across = mesh_union(pipeline, rank, groups)
    stage = pipeline.ranks.index(rank)
    if pipeline.root is None:
        last = _part((), tensors, rank, across, Union((rank,), ()))
        return ReductionPlan(tuple(_parts(mine, tensors, rank, groups)), last, stage, across.steps)
    root = pipeline.root
    inside = set(range(root.ndim)) - set(root.spanned_dims(pipeline.ranks) or ())
    everyone, within = mesh_union(root, rank, groups), mesh_union(root, rank, groups, inside)
    part = replace(_part(mine, tensors, rank, everyone, within), stage=stage, num_stages=pipeline.size)
    return ReductionPlan((part,), None, stage, across.steps)


def _parts(mine: Sequence[int], tensors: tuple[TensorMeta, ...], rank: int, groups: Groups) -> Iterable[Part]:
    """One part for the closed union; without one each set of ranks finishes by itself, sorted against deadlocks."""
    layouts = {i: layout for i in mine if (layout := tensors[i].layout) is not None}
    union = closed_union(dict.fromkeys(layout.mesh for layout in layouts.values()), rank, groups)
    if union is not None:
        yield _part(mine, tensors, rank, union, union)
        return
    members: dict[Ranks, list[int]] = {}
    for i in mine:
        members.setdefault(tuple(sorted(layouts[i].mesh.ranks)) if i in layouts else (rank,), []).append(i)
    for _, indices in sorted(members.items()):
        first = layouts.get(indices[0])
        alone = mesh_union(Mesh((1,), (rank,)) if first is None else first.mesh, rank, groups)
        yield _part(indices, tensors, rank, alone, alone)


def _part(
    indices: Sequence[int], tensors: tuple[TensorMeta, ...], rank: int, union: Union, within: Union
) -> Part:
    """A part over ``union`` whose tensors are held by the ranks ``within`` (a stage, where there are several)."""
    size = len(within.ranks)
    # Stages with other tensors must find the same divisor, so only a stage by itself may shorten the fraction.
    unit = gcd(size, *(tensors[i].pieces() for i in indices)) if union == within else 1
    terms: dict[tuple[int, str | None, tuple[tuple[Ranks, str], ...], Ranks], list[int]] = {}
    copies, slot = [], 0
    for i in indices:
        meta, pieces = tensors[i], tensors[i].pieces()
        chain = reduce_chain(meta.layout, rank)
        # Two meshes may have the same lines through this rank, and others through the next rank along them.
        whole = meta.layout.mesh.ranks if meta.layout is not None and len(chain) > 1 else ()
        terms.setdefault((pieces // unit, meta.shared, chain, whole), []).append(i)
        if pieces < size:
            copies.append((i, slot + (0 if meta.layout is None else meta.layout.chunk(rank))))
            slot += meta.num_chunks
    metas = tuple(tensors[i] for i in indices)
    own_digest = digest_bits("\n".join([str(within.ranks), *map(str, metas)]))
    built = [
        (chain, Term(weight, tuple(members), shared)) for (weight, shared, chain, _), members in terms.items()
    ]
    return Part(
        steps=union.steps,
        terms=tuple(term for chain, term in built if not chain),
        reductions=tuple(
            Reduction(chain, term, tuple(local_numel(tensors[i], rank) for i in term.indices))
            for chain, term in built
            if chain
        ),
        divisor=size // unit,
        copies=tuple(copies),
        num_slots=slot,
        copy_steps=within.steps,
        indices=tuple(indices),
        tensors=metas,
        digest=own_digest if union == within else digest_bits(str(union.ranks)),
        own_digest=own_digest,
        errors=tuple(_misfits(metas, within)),
    )


def reduce_chain(layout: Layout | None, rank: int) -> tuple[tuple[Ranks, str], ...]:
    """The (ranks in mesh order, reduce op) along which a Partial tensor is reduced, one mesh dim after another."""
    if layout is None:
        return ()
    reduce_ops = [(d, p.reduce_op) for d, p in enumerate(layout.placements) if isinstance(p, Partial)]
    lines = [(layout.mesh.slice_ranks(rank, (d,)), reduce_op) for d, reduce_op in reduce_ops]
    return tuple((ranks, reduce_op) for ranks, reduce_op in lines if len(ranks) > 1)


def local_numel(meta: TensorMeta, rank: int) -> int:
    """The number of elements that ``rank`` holds of a tensor with a layout."""
    return 0 if meta.layout is None else prod(meta.layout.local_shape(rank))


def _misfits(metas: Sequence[TensorMeta], union: Union) -> Iterable[str]:
    meshes = {meta.layout.mesh for meta in metas if meta.layout is not None}
    outside = {mesh: sorted(set(mesh.ranks).difference(union.ranks)) for mesh in meshes}
    for meta in metas:
        if meta.layout is None:
            continue
        mesh = meta.layout.mesh
        if outside[mesh]:
            yield f"{meta.name} lies on ranks {outside[mesh]}, which are not in this pipeline stage {union.ranks}"
        elif len(union.ranks) % mesh.size:
            yield (
                f"{meta.name} lies on a mesh of {mesh.size} ranks, which cannot have sister meshes on all of the "
                f"{len(union.ranks)} ranks {union.ranks} that clip together"
            )

"""The part of a plan in which, of every set of identical shards, one rank counts."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.plan import Part, Reduction, TensorMeta, Term, digest_bits, local_numel, reduce_chain
from hyper_parallel.core.union import Ranks, Union


def staged_part(
    tensors: tuple[TensorMeta, ...],
    rank: int,
    stage: Union,
    holders: tuple[Ranks, ...],
    errors: tuple[str, ...],
) -> Part:
    """A part over ``stage``; a gradient on only some of the ranks that hold the same shard is an error in it.

    Args:
        tensors: those that take part, in the same order on every rank.
        rank: this process's global rank.
        stage: the ranks that hold them.
        holders: of each tensor the ranks that hold what this rank holds, ascending; none if the tensor is unknown.
            The first one counts. Of a Partial tensor the ranks that reduce it together with the first one count,
            each its own slice; other copies are reduced as well, to find out whether they have a gradient.
        errors: what this rank found to be wrong.
    """
    counted: list[int] = []
    reductions: dict[tuple[tuple[tuple[Ranks, str], ...], int], list[int]] = {}
    for index, (meta, ranks) in enumerate(zip(tensors, holders, strict=True)):
        chain = reduce_chain(meta.layout, rank)
        if not chain and ranks[:1] == (rank,):
            counted.append(index)
        elif chain:
            reductions.setdefault((chain, _reduces_with(meta, rank, ranks)), []).append(index)
    digest = digest_bits("\n".join([str(stage.ranks), *map(str, tensors)]))
    return Part(
        steps=stage.steps,
        terms=(Term(1, tuple(counted)),),
        reductions=tuple(
            Reduction(
                chain, Term(weight, tuple(indices)), tuple(local_numel(tensors[i], rank) for i in indices)
            )
            for (chain, weight), indices in reductions.items()
        ),
        divisor=1,
        copies=tuple((i, ranks[0]) for i, ranks in enumerate(holders) if len(ranks) > 1),
        num_slots=0,
        copy_steps=stage.steps,
        indices=tuple(range(len(tensors))),
        tensors=tensors,
        digest=digest,
        own_digest=digest,
        errors=errors,
        strict=True,
    )


def _reduces_with(meta: TensorMeta, rank: int, ranks: Sequence[int]) -> int:
    """Whether this rank reaches the one that counts along Partial mesh dims alone."""
    assert meta.layout is not None
    return int(bool(ranks) and ranks[0] in meta.layout.mesh.slice_ranks(rank, meta.layout.partial_dims))


def layout_replicas(tensors: Sequence[TensorMeta], rank: int, stage: Ranks) -> list[Ranks | None]:
    """For each tensor the ranks of ``stage`` that hold what ``rank`` holds, ascending; None if its layout does not tell.

    A slice of a root mesh has sister slices, on which the same tensor lies; a smaller mesh without a root has none
    that are known. It takes O(ranks) for each mesh and its sharded dims, O(1) for any other tensor.
    """
    known: dict[tuple[Mesh, tuple[int, ...]], Ranks | None] = {}
    found: list[Ranks | None] = []
    for layout in (meta.layout for meta in tensors):
        if layout is None:
            found.append(stage)
            continue
        key = layout.mesh, layout.shard_dims
        if key not in known:
            known[key] = _replicas(*key, rank, stage)
        found.append(known[key])
    return found


def _replicas(mesh: Mesh, shard_dims: tuple[int, ...], rank: int, stage: Ranks) -> Ranks | None:
    root = mesh.root or mesh
    spans = root.spanned_dims(mesh.ranks)
    wide = [d for d, size in enumerate(mesh.shape) if size > 1]
    if spans is None or [root.shape[d] for d in spans] != [mesh.shape[d] for d in wide]:
        return None
    if not set(mesh.ranks) <= set(stage) <= set(root.ranks):
        return None
    sharded = {spans[wide.index(d)] for d in shard_dims if d in wide}
    replicas = root.slice_ranks(rank, [d for d in range(root.ndim) if d not in sharded])
    return tuple(sorted(set(replicas).intersection(stage)))

"""Meshes, tensors and plans that the tests of planning share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Placement
from hyper_parallel.core.plan import Part, ReductionPlan, TensorMeta, build_plan

WORLD = Mesh((8,), tuple(range(8)), ("dp",))
ROOT = Mesh((2, 2, 2), tuple(range(8)), ("pp", "dp", "tp"))


def sliced(root: Mesh, rank: int, *names: str) -> Mesh:
    dims = tuple(root.dim_names.index(name) for name in names)
    return Mesh(tuple(root.shape[d] for d in dims), root.slice_ranks(rank, dims), names, root)


def meta(name: str, mesh: Mesh | None, *placements: Placement, shape: tuple[int, ...] = (8, 4)) -> TensorMeta:
    return TensorMeta(name, shape, None if mesh is None else Layout(mesh, placements, shape))


def plans(
    build: Callable[[int], Iterable[TensorMeta]], ranks: Iterable[int], groups: Iterable[tuple[int, ...]] = ()
) -> dict[int, ReductionPlan]:
    """The plan of every rank; ``build(rank)`` gives its tensors."""
    return {rank: build_plan(tuple(build(rank)), rank, frozenset(groups)) for rank in ranks}


def only_part(plan: ReductionPlan) -> Part:
    (part,) = plan.parts
    return part

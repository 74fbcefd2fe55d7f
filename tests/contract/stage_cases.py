"""Random pipelines over simulated ranks: each stage has parameters of its own, or none, and some are shared.

The right answer comes from the global values of every stage: what counts on a stage is painted as for ``rank_cases``,
and of the stages that hold one key the first one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from hypothesis import strategies as st

import hyper_parallel
from hyper_parallel import Layout, Mesh, Partial
from tests.contract.numpy_platform import Parameter
from tests.contract.numpy_world import Outcome, World
from tests.contract.partial_cases import OPS, Terms, partial_axes, presence
from tests.contract.rank_cases import (
    DTYPES,
    Result,
    Spec,
    assert_clipped,
    factorisations,
    placements_on,
    sliced,
)
from tests.unit.brute_force import coordinate_in, norm_of


@dataclass(frozen=True)
class Pipeline:
    """``stages[s]`` are the parameters of stage s, each with its key or None; ``root`` holds all ranks.

    Without ``rooted`` the meshes know nothing of each other: each stage has its own, and so has each line of ranks
    through the stages. If ``united``, there are process groups of the world and of the stages.
    """

    root: Mesh
    pp_dim: int
    rooted: bool
    stages: tuple[tuple[tuple[str | None, Any], ...], ...]
    united: bool = True

    @property
    def world_size(self) -> int:
        return self.root.size

    def grid(self) -> np.ndarray:
        return np.moveaxis(np.array(self.root.ranks).reshape(self.root.shape), self.pp_dim, 0)

    def stage(self, rank: int) -> int:
        return coordinate_in(self.root.shape, self.root.ranks, rank)[self.pp_dim]

    def line(self, rank: int) -> tuple[int, ...]:
        """The ranks, one per stage, that ``rank`` meets in the pipeline's group, in mesh order."""
        grid = self.grid().reshape(len(self.stages), -1)
        return tuple(grid[:, np.argwhere(grid[self.stage(rank)] == rank)[0, 0]].tolist())

    def pp_mesh(self, rank: int) -> Mesh:
        names = self.root.dim_names and (self.root.dim_names[self.pp_dim],)
        return Mesh((len(self.stages),), self.line(rank), names, self.root if self.rooted else None)

    def specs(self, rank: int) -> list[Any]:
        return [spec for _, spec in self.stages[self.stage(rank)]]

    def model(self, rank: int) -> list[Parameter]:
        return [
            parameter if key is None else hyper_parallel.mark_shared(parameter, key)
            for key, spec in self.stages[self.stage(rank)]
            for parameter in [spec.parameter(rank)]
        ]

    def together(self, rank: int) -> frozenset[int]:
        """The ranks of the same stage that clip together: all, or those that meshes link."""
        if self.rooted:
            return frozenset(self.grid()[self.stage(rank)].reshape(-1).tolist())
        linked = {rank}
        while True:
            layouts = [spec.layouts[member] for spec in self.specs(rank) for member in linked]
            more = linked.union(*(layout.mesh.ranks for layout in layouts if layout is not None))
            if more == linked:
                return frozenset(linked)
            linked = more

    def counted(self, rank: int) -> list[np.ndarray]:
        """The values that count for ``rank``, on all stages; a key counts on the first stage that holds it."""
        found, keys = [], set()
        for member in self.line(rank):
            for key, spec in self.stages[self.stage(member)]:
                if key is None or key not in keys:
                    found.append(spec.counted(self.together(member)))
            keys |= {key for key, _ in self.stages[self.stage(member)]}
        return found

    def groups(self) -> set[tuple[int, ...]]:
        """The lines of every mesh and of the root; if ``united`` also the world, the stages and what they link."""
        meshes = {
            s.layouts[r].mesh for r in self.root.ranks for s in self.specs(r) if s.layouts[r] is not None
        }
        found = {tuple(sorted(self.line(rank))) for rank in self.root.ranks}
        for mesh in [*meshes, self.root, *(m.root for m in meshes if m.root is not None)]:
            for rank in mesh.ranks:
                found |= {tuple(sorted(mesh.slice_ranks(rank, (d,)))) for d in range(mesh.ndim)}
        if self.united:
            found |= {tuple(sorted(self.together(rank))) for rank in self.root.ranks}
            found |= {tuple(sorted(stage.reshape(-1).tolist())) for stage in self.grid()}
            found.add(tuple(range(self.world_size)))
        return found


def clip_pipeline(
    case: Pipeline, models: list[list[Parameter]], world: World, p: float, max_norm: float = 1.0, **more: Any
) -> list[Outcome]:
    """``clip_grad_norm_`` on every rank."""

    def step(rank: int) -> Result:
        norm = hyper_parallel.clip_grad_norm_(models[rank], max_norm, p, pp_mesh=case.pp_mesh(rank), **more)
        return Result(norm, [parameter.grad for parameter in models[rank]])

    return world.run(step)


def set_gradients(case: Pipeline, models: list[list[Parameter]]) -> None:
    for rank, model in enumerate(models):
        for spec, parameter in zip(case.specs(rank), model, strict=True):
            parameter.grad = spec.gradient(rank)


@dataclass(frozen=True)
class _OneRank:
    """What ``assert_clipped`` reads of a case."""

    specs: list[Any]


def assert_pipeline_right(case: Pipeline, outcomes: list[Outcome], p: float, max_norm: float = 1.0) -> None:
    """The norm, its dtype and every gradient are right on every rank of every stage."""
    for rank, outcome in enumerate(outcomes):
        result = outcome.get()
        expected = norm_of(case.counted(rank), p)
        present = [spec for spec in case.specs(rank) if spec.present[rank]]
        dtype = np.result_type(*(spec.dtype for spec in present)) if present else np.dtype(np.float32)
        assert result.norm.dtype == dtype
        tolerance = 1e-3 if dtype == np.float16 else 2e-6
        np.testing.assert_allclose(
            float(result.norm), expected, rtol=tolerance, err_msg=f"norm on rank {rank}"
        )
        assert_clipped(_OneRank(case.specs(rank)), rank, result, min(1.0, max_norm / (expected + 1e-6)))
    if case.rooted:
        bits: dict[str, set[bytes]] = {}
        for outcome in outcomes:
            norm = np.asarray(outcome.get().norm)
            bits.setdefault(norm.dtype.str, set()).add(norm.tobytes())
        assert all(len(found) == 1 for found in bits.values()), "the norm has different bits"


# ---- drawing cases


def split(values: np.ndarray, ops: Iterable[str], sizes: Iterable[int], seed: int) -> np.ndarray:
    """Terms that the ops reduce to ``values``, one axis after another."""
    generator = np.random.default_rng(seed)
    terms = np.asarray(values, np.float64)
    for op, size in reversed(list(zip(ops, sizes, strict=True))):
        others = generator.integers(0, 5, (size - 1, *terms.shape)) / 4
        if op in ("max", "min"):
            rest, last = terms + (others if op == "min" else -others), terms
        else:
            rest, last = others, terms * (size if op == "avg" else 1) - others.sum(axis=0)
        terms = np.concatenate([rest, last[None]])
    return terms


@st.composite
def layouts_on_stages(
    draw: st.DrawFn, case: Pipeline, ndim: int, shape: tuple[int, ...], partial: bool
) -> Any:
    """A layout on the mesh of each stage, on a slice of it, or none; the same for every stage."""
    inner = [d for d in range(case.root.ndim) if d != case.pp_dim]
    subsets = [dims for number in range(1, len(inner) + 1) for dims in combinations(inner, number)]
    if not subsets or (not partial and draw(st.integers(0, 4)) == 0):
        return (None,) * case.world_size
    mesh_dims = draw(st.sampled_from(subsets))
    placements = [draw(placements_on(ndim)) for _ in mesh_dims]
    if partial:
        placements[draw(st.integers(0, len(placements) - 1))] = Partial(draw(st.sampled_from(OPS)))
    found = []
    for rank in range(case.world_size):
        mesh = sliced(case.root, mesh_dims, rank)
        if not case.rooted:
            stage = sliced(case.root, tuple(inner), rank)
            alone = Mesh(stage.shape, stage.ranks, stage.dim_names)
            mesh = sliced(alone, tuple(inner.index(d) for d in mesh_dims), rank)
        found.append(Layout(mesh, tuple(placements), shape))
    return tuple(found)


@st.composite
def stage_specs(draw: st.DrawFn, case: Pipeline, values: np.ndarray, kind: str, missing: bool = False) -> Any:
    """A parameter of a stage whose reduced global gradient is ``values``."""
    layouts = draw(layouts_on_stages(case, values.ndim, values.shape, kind == "partial"))
    dtype = draw(st.sampled_from(DTYPES))
    if layouts[0] is None or not partial_axes(layouts[0]):
        present = (True,) * case.world_size
        if missing:
            present = tuple(draw(st.booleans()) for _ in present)
        return Spec(values, layouts, present, dtype)
    sizes = [layouts[0].mesh.shape[axis] for axis in partial_axes(layouts[0])]
    ops = [layouts[0].placements[axis].reduce_op for axis in partial_axes(layouts[0])]
    terms = split(values, ops, sizes, draw(st.integers(0, 2**16)))
    present = draw(presence(layouts)) if missing else (True,) * case.world_size
    return Terms(terms, layouts, present, dtype)


@st.composite
def pipelines(
    draw: st.DrawFn,
    rooted: bool | None = None,
    missing: bool = False,
    partial: bool = True,
    empty: bool = True,
    sizes: Sequence[int] = (2, 3, 4, 4, 6, 6, 8),
) -> Pipeline:
    """A pipeline of two or more stages, with shared parameters on some of them."""
    size = draw(st.sampled_from(sizes))
    shapes = [s for n in (2, 3) for s in factorisations(size, n) if max(s) > 1]
    shape = draw(st.sampled_from(shapes))
    pp_dim = draw(st.sampled_from([d for d, number in enumerate(shape) if number > 1]))
    united = draw(
        st.booleans()
    )  # only then are ranks permuted, as sums over lines in different orders differ in bits
    ranks = draw(st.permutations(range(size))) if united and draw(st.booleans()) else range(size)
    rooted = draw(st.booleans()) if rooted is None else rooted
    root = Mesh(shape, tuple(ranks), ("x", "y", "z")[: len(shape)])
    bare = Pipeline(root, pp_dim, rooted, ((),) * shape[pp_dim], united)
    shared = {key: _values(draw) for key in ("a", "b")[: draw(st.integers(0, 2))]}
    kinds = ["plain", "plain", "partial"] if partial else ["plain"]
    stages = []
    for _ in range(shape[pp_dim]):
        members: list[tuple[str | None, Any]] = [
            (None, draw(stage_specs(bare, _values(draw), draw(st.sampled_from(kinds)), missing)))
            for _ in range(draw(st.integers(0 if empty else 1, 2)))
        ]
        for key, values in shared.items():
            if draw(st.integers(0, 2)):
                members.append((key, draw(stage_specs(bare, values, draw(st.sampled_from(kinds))))))
        stages.append(tuple(members))
    return replace(bare, stages=tuple(stages))


def _values(draw: st.DrawFn) -> np.ndarray:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=2)))
    return np.random.default_rng(draw(st.integers(0, 2**16))).integers(-8, 9, shape) / 4

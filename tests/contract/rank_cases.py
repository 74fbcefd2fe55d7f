"""Random models over simulated ranks, and what the right answer for them is, found without the library.

A case is drawn as metadata and global values. The ranks that clip together are those that meshes link, directly or
through others. An element counts if any of them that holds it has a gradient there; that is painted into a bitmap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from hypothesis import strategies as st

import hyper_parallel
from hyper_parallel import Layout, Mesh, Replicate, Shard, StridedShard
from hyper_parallel.interface import LAYOUT_ATTRIBUTE
from tests.contract.numpy_platform import Parameter, Tensor
from tests.contract.numpy_world import Outcome, World
from tests.unit.brute_force import held_grid, local_part, norm_of

DTYPES = ("float32", "float64", "float16")


@dataclass(frozen=True)
class Spec:
    """One parameter: its global gradient, its layout as each rank sees it, and the ranks that have a gradient."""

    values: np.ndarray
    layouts: tuple[Layout | None, ...]
    present: tuple[bool, ...]
    dtype: str = "float32"

    def __repr__(self) -> str:
        """What a failure shows: the first rank's layout and who has a gradient."""
        layout, here = self.layouts[0], "".join("01"[present] for present in self.present)
        where = "plain" if layout is None else f"{layout.placements} on {layout.mesh}"
        return (
            f"Spec({self.dtype}{self.values.shape}, {where}, present {here}, values {self.values.tolist()})"
        )

    def local(self, rank: int) -> np.ndarray:
        """What ``rank`` has of the gradient, or would have if it is missing there."""
        return local_part(self.values, self.layouts[rank], rank)

    def gradient(self, rank: int) -> np.ndarray | None:
        return self.local(rank).astype(self.dtype).view(Tensor) if self.present[rank] else None

    def parameter(self, rank: int) -> Parameter:
        layout = self.layouts[rank]
        parameter = Parameter(np.ones_like(self.local(rank), self.dtype), self.gradient(rank))
        if layout is not None:
            setattr(parameter, LAYOUT_ATTRIBUTE, layout)
        return parameter

    def counted(self, ranks: Iterable[int]) -> np.ndarray:
        """The values that count where ``ranks`` clip together: what any of them holds a gradient for."""
        bitmap = np.zeros(self.values.shape, bool)
        for rank in ranks:
            if self.present[rank]:
                layout = self.layouts[rank]
                bitmap[... if layout is None else held_grid(layout, rank)] = True
        return self.values[bitmap]


@dataclass(frozen=True)
class Case:
    """A model on ``world_size`` ranks."""

    world_size: int
    specs: tuple[Any, ...]

    def model(self, rank: int) -> list[Parameter]:
        return [spec.parameter(rank) for spec in self.specs]

    def together(self, rank: int) -> frozenset[int]:
        """The ranks that clip together with ``rank``."""
        linked = {rank}
        while True:
            layouts = [spec.layouts[member] for spec in self.specs for member in linked]
            more = linked.union(*(layout.mesh.ranks for layout in layouts if layout is not None))
            if more == linked:
                return frozenset(linked)
            linked = more

    def groups(self) -> set[tuple[int, ...]]:
        """One process group for each set of ranks that clip together."""
        return {tuple(sorted(self.together(rank))) for rank in range(self.world_size)}

    def mesh_groups(self) -> set[tuple[int, ...]]:
        """The process groups of single mesh dims only, of the meshes and of their roots."""
        meshes = [layout.mesh for spec in self.specs for layout in spec.layouts if layout is not None]
        return {
            tuple(sorted(mesh.slice_ranks(rank, (mesh_dim,))))
            for mesh in [*meshes, *(mesh.root for mesh in meshes if mesh.root is not None)]
            for mesh_dim in range(mesh.ndim)
            for rank in mesh.ranks
        }

    def counted(self, rank: int) -> list[np.ndarray]:
        """The values that count, per parameter, as seen by ``rank``."""
        return [spec.counted(self.together(rank)) for spec in self.specs]

    def uneven(self) -> bool:
        """Whether a gradient is there on some ranks and missing on others that clip together."""
        return any(
            len({spec.present[member] for member in self.together(rank)}) > 1
            for spec in self.specs
            for rank in range(self.world_size)
        )


@dataclass(frozen=True)
class Result:
    """What one rank has after a call: the norm and the local gradients."""

    norm: Any
    gradients: list[np.ndarray | None]


def clip_on_all_ranks(
    case: Case,
    max_norm: float,
    p: float,
    groups: Iterable[tuple[int, ...]],
    steps: int = 1,
    **arguments: Any,
) -> tuple[World, list[Outcome]]:
    """``clip_grad_norm_`` on every rank; after the first step gradients are set anew, as training does."""
    world = World(case.world_size, groups)
    models = [case.model(rank) for rank in range(case.world_size)]
    for _ in range(steps):
        for rank, model in enumerate(models):
            for spec, parameter in zip(case.specs, model, strict=True):
                parameter.grad = spec.gradient(rank)

        def step(rank: int) -> Result:
            norm = hyper_parallel.clip_grad_norm_(models[rank], max_norm, p, **arguments)
            return Result(norm, [parameter.grad for parameter in models[rank]])

        outcomes = world.run(step)
    return world, outcomes


def assert_right(case: Case, outcomes: list[Outcome], max_norm: float, p: float) -> None:
    """The norm, its bits, its dtype and every gradient are right on every rank."""
    bits: dict[frozenset[int], set[bytes]] = {}
    for rank, outcome in enumerate(outcomes):
        result = outcome.get()
        expected = norm_of(case.counted(rank), p)
        present = [spec for spec in case.specs if spec.present[rank]]
        dtype = np.result_type(*(spec.dtype for spec in present)) if present else np.dtype(np.float32)
        tolerance = 1e-3 if dtype == np.float16 else 2e-6
        assert result.norm.dtype == dtype
        np.testing.assert_allclose(
            float(result.norm), expected, rtol=tolerance, err_msg=f"norm on rank {rank}"
        )
        bits.setdefault(case.together(rank), set()).add((dtype.str, np.asarray(result.norm).tobytes()))
        assert_clipped(case, rank, result, min(1.0, max_norm / (expected + 1e-6)))
    for ranks, found in bits.items():
        assert len({d for d, _ in found}) == len(found), (
            f"the norm has different bits on ranks {sorted(ranks)}"
        )


def assert_clipped(case: Case, rank: int, result: Result, coefficient: float) -> None:
    for index, (spec, gradient) in enumerate(zip(case.specs, result.gradients, strict=True)):
        original = spec.gradient(rank)
        assert (gradient is None) == (original is None)
        if gradient is not None:
            assert gradient.dtype == original.dtype
            tolerance = 2e-3 if spec.dtype == "float16" else 2e-6
            expected = original.astype(np.float64) * coefficient
            np.testing.assert_allclose(
                gradient, expected, rtol=tolerance, atol=1e-7, err_msg=f"tensor {index} on rank {rank}"
            )


# ---- drawing cases


def factorisations(number: int, ndim: int) -> list[tuple[int, ...]]:
    """All meshes shapes of ``ndim`` dims (sizes of 1 included) with ``number`` ranks."""
    if ndim == 1:
        return [(number,)]
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return [(d, *rest) for d in divisors for rest in factorisations(number // d, ndim - 1)]


@st.composite
def whole_meshes(draw: st.DrawFn, world_size: int, permuted: bool = True) -> Mesh:
    """A mesh of all ranks, in any order if ``permuted``."""
    shape = draw(st.sampled_from(factorisations(world_size, draw(st.integers(1, 3)))))
    in_order = st.just(range(world_size))
    ranks = draw(st.one_of(in_order, st.permutations(range(world_size))) if permuted else in_order)
    return Mesh(shape, tuple(ranks), draw(st.sampled_from([None, tuple("abc"[: len(shape)])])))


def sliced(root: Mesh, mesh_dims: tuple[int, ...], rank: int) -> Mesh:
    """The slice of ``root`` along some dims that ``rank`` is in, or the root itself."""
    if len(mesh_dims) == root.ndim:
        return root
    names = None if root.dim_names is None else tuple(root.dim_names[d] for d in mesh_dims)
    return Mesh(tuple(root.shape[d] for d in mesh_dims), root.slice_ranks(rank, mesh_dims), names, root)


@st.composite
def placements_on(draw: st.DrawFn, ndim: int) -> Any:
    """A placement without Partial, for a tensor of ``ndim`` dims."""
    kinds: list[Callable[[], Any]] = [Replicate]
    if ndim:
        dim = draw(st.integers(0, ndim - 1))
        kinds += [lambda: Shard(dim), lambda: StridedShard(dim, split_factor=draw(st.integers(1, 3)))]
    return draw(st.sampled_from(kinds))()


@st.composite
def specs(draw: st.DrawFn, root: Mesh, missing: bool) -> Spec:
    """A parameter on ``root``, on a slice of it, or plain."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    seed = draw(st.integers(0, 2**16))
    dtype = draw(st.sampled_from(DTYPES))
    generator = np.random.default_rng(seed)
    values = (generator.integers(-8, 9, shape) / 4).astype(dtype).astype(np.float64)
    world_size = root.size
    subsets = [dims for number in range(1, root.ndim + 1) for dims in combinations(range(root.ndim), number)]
    layouts: tuple[Layout | None, ...] = (None,) * world_size
    if draw(st.integers(0, 4)):
        mesh_dims = draw(st.sampled_from(subsets))
        placements = tuple(draw(placements_on(len(shape))) for _ in mesh_dims)
        layouts = tuple(
            Layout(sliced(root, mesh_dims, rank), placements, shape) for rank in range(world_size)
        )
    present = (draw(st.booleans()),) * world_size
    if missing:
        present = tuple(draw(st.booleans()) for _ in range(world_size))
    return Spec(values, layouts, present, dtype)


@st.composite
def cases(draw: st.DrawFn, missing: bool = True, sizes: Sequence[int] = range(1, 7)) -> Case:
    """Slices of one root mesh and plain tensors, or several independent meshes of all ranks."""
    world_size = draw(st.sampled_from(sizes))
    roots = [draw(whole_meshes(world_size))]
    several = draw(st.booleans())
    if several:
        roots = [*roots, draw(whole_meshes(world_size))]
    members = [draw(specs(draw(st.sampled_from(roots)), missing)) for _ in range(draw(st.integers(1, 5)))]
    if several:  # one parameter on each whole mesh closes the union of them
        values = np.arange(6.0).reshape(3, 2)
        for root in roots:
            layout = Layout(root, (Shard(0), *[Replicate()] * (root.ndim - 1)), (3, 2))
            members.append(Spec(values, (layout,) * world_size, (True,) * world_size))
    return Case(world_size, tuple(members))

"""Random Partial gradients over simulated ranks, and their values found without the library.

The terms of a tensor are one array: an axis per Partial mesh dim, then the axes of the global tensor. What the ranks
hold is painted into it, and the Partial axes are reduced one after another. A term that nobody holds is the
identity of the op it goes into; an element of which there is no term at all does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from hyper_parallel import Layout, Mesh, Partial, Replicate, Shard
from hyper_parallel.interface import LAYOUT_ATTRIBUTE
from tests.contract.numpy_platform import Parameter, Tensor
from tests.contract.numpy_world import Outcome
from tests.contract.process_memory import new_processes
from tests.contract.rank_cases import DTYPES, Case, Spec, placements_on, sliced, specs, whole_meshes
from tests.unit.brute_force import coordinate_in, held_grid, local_part

OPS = ("sum", "avg", "max", "min")
IDENTITY = {"sum": 0.0, "avg": 0.0, "max": -math.inf, "min": math.inf}


def partial_axes(layout: Any) -> list[int]:
    """The mesh dims that hold terms, by class name only."""
    return [d for d, p in enumerate(layout.placements) if type(p).__name__ == "Partial"]


@dataclass(frozen=True)
class Terms:
    """One Partial parameter: its terms, its layout as each rank sees it, and the ranks that have a gradient."""

    terms: np.ndarray
    layouts: tuple[Layout, ...]
    present: tuple[bool, ...]
    dtype: str = "float32"

    def __repr__(self) -> str:
        layout, here = self.layouts[0], "".join("01"[present] for present in self.present)
        where = f"{layout.global_shape}, {layout.placements} on {layout.mesh}"
        return f"Terms({self.dtype}{where}, present {here}, terms {self.terms.tolist()})"

    def index(self, rank: int) -> tuple[int, ...]:
        """Which term ``rank`` holds."""
        layout = self.layouts[rank]
        here = coordinate_in(layout.mesh.shape, layout.mesh.ranks, rank)
        return tuple(here[d] for d in partial_axes(layout))

    def local(self, rank: int) -> np.ndarray:
        """The term of ``rank``, or what it would have if it is missing there."""
        return local_part(self.terms[self.index(rank)], self.layouts[rank], rank)

    def gradient(self, rank: int) -> np.ndarray | None:
        return self.local(rank).astype(self.dtype).view(Tensor) if self.present[rank] else None

    def parameter(self, rank: int) -> Parameter:
        parameter = Parameter(np.ones_like(self.local(rank), self.dtype), self.gradient(rank))
        setattr(parameter, LAYOUT_ATTRIBUTE, self.layouts[rank])
        return parameter

    def lines(self, rank: int) -> list[tuple[tuple[int, ...], str]]:
        """The ranks that hold the terms to reduce with those of ``rank``, and the op, per Partial mesh dim."""
        layout = self.layouts[rank]
        here = coordinate_in(layout.mesh.shape, layout.mesh.ranks, rank)
        ranks = np.array(layout.mesh.ranks).reshape(layout.mesh.shape)
        found = []
        for axis in partial_axes(layout):
            line = ranks[tuple(slice(None) if d == axis else c for d, c in enumerate(here))]
            found.append((tuple(sorted(line.tolist())), layout.placements[axis].reduce_op))
        return found

    def counted(self, ranks: Iterable[int]) -> np.ndarray:
        """The reduced values, where ``ranks`` have any term of them."""
        held = np.zeros(self.terms.shape, bool)
        layout = None
        for rank in ranks:
            layout = self.layouts[rank]
            if self.present[rank]:
                held[(*self.index(rank), ...)][held_grid(layout, rank)] = True
        values = self.terms
        for axis in [] if layout is None else partial_axes(layout):
            values = reduced(
                np.where(held, values, IDENTITY[layout.placements[axis].reduce_op]), layout, axis
            )
            held = held.any(axis=0)
        return values[held]


def reduced(values: np.ndarray, layout: Any, axis: int) -> np.ndarray:
    """The first axis of ``values`` reduced by the op of mesh dim ``axis``."""
    op = layout.placements[axis].reduce_op
    if op == "avg":
        return values.sum(axis=0) / len(values)
    return {"sum": np.sum, "max": np.max, "min": np.min}[op](values, axis=0)


@dataclass(frozen=True)
class PartialCase(Case):
    """A model on ranks that have a process group per mesh dim, and one for all that clip together if so drawn."""

    united: bool = True
    bucket: int = field(default=7)

    def process_groups(self) -> set[tuple[int, ...]]:
        return self.mesh_groups() | (self.groups() if self.united else set())


@contextmanager
def small_buckets(numel: int) -> Iterator[None]:
    """Buckets of ``numel`` elements, and ranks that remember nothing of earlier cases."""
    with pytest.MonkeyPatch.context() as patch, new_processes():
        patch.setattr("hyper_parallel.partials.BUCKET_NUMEL", numel)
        yield


def assert_same_sequence(outcomes: list[Outcome]) -> None:
    """The members of every group enter the same collectives over it, in the same order, whatever their number."""
    for rank, outcome in enumerate(outcomes):
        for group in {call.ranks for call in outcome.calls}:
            mine = [call.what for call in outcome.calls if call.ranks == group]
            for other in group:
                theirs = [call.what for call in outcomes[other].calls if call.ranks == group]
                assert theirs == mine, f"over {group} rank {rank} enters {mine}, rank {other} {theirs}"


# ---- drawing cases


def place(layout: Any, rank: int) -> tuple[int, ...]:
    """Which term and which shard ``rank`` holds; its copies have the same."""
    here = coordinate_in(layout.mesh.shape, layout.mesh.ranks, rank)
    return tuple(c for c, p in zip(here, layout.placements, strict=True) if type(p).__name__ != "Replicate")


@st.composite
def presence(draw: st.DrawFn, layouts: tuple[Layout, ...]) -> tuple[bool, ...]:
    """Who has a gradient: the copies of a term alike; all, none, or some."""
    kind = draw(st.sampled_from(["all", "all", "some", "some", "none"]))
    places = [place(layout, rank) for rank, layout in enumerate(layouts)]
    if kind != "some":
        return (kind == "all",) * len(places)
    chosen = {one: draw(st.booleans()) for one in sorted(set(places))}
    return tuple(chosen[one] for one in places)


@st.composite
def partial_placements(draw: st.DrawFn, ndim: int, mesh_ndim: int) -> tuple[Any, ...]:
    """At least one Partial among placements for a tensor of ``ndim`` dims."""
    placements = [
        Partial(draw(st.sampled_from(OPS))) if draw(st.booleans()) else draw(placements_on(ndim))
        for _ in range(mesh_ndim)
    ]
    placements[draw(st.integers(0, mesh_ndim - 1))] = Partial(draw(st.sampled_from(OPS)))
    return tuple(placements)


@st.composite
def terms(draw: st.DrawFn, root: Mesh, missing: bool = True) -> Terms:
    """A Partial parameter on ``root`` or on a slice of it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    subsets = [dims for number in range(1, root.ndim + 1) for dims in combinations(range(root.ndim), number)]
    mesh_dims = draw(st.sampled_from(subsets))
    placements = draw(partial_placements(len(shape), len(mesh_dims)))
    layouts = tuple(Layout(sliced(root, mesh_dims, rank), placements, shape) for rank in range(root.size))
    sizes = [layouts[0].mesh.shape[d] for d in partial_axes(layouts[0])]
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    values = generator.integers(-8, 9, (*sizes, *shape)) / 4
    present = draw(presence(layouts)) if missing else (True,) * root.size
    return Terms(values, layouts, present, draw(st.sampled_from(DTYPES)))


@st.composite
def partial_cases(
    draw: st.DrawFn, missing: bool = True, sizes: Sequence[int] = (1, 2, 2, 3, 4, 4, 6, 6, 8)
) -> PartialCase:
    """Partial tensors beside others, on slices of one root or on two independent meshes of all ranks."""
    world_size = draw(st.sampled_from(sizes))
    united = draw(st.booleans())
    roots = [draw(whole_meshes(world_size, permuted=united))]
    several = draw(st.integers(0, 3)) == 0
    if several:
        roots.append(draw(whole_meshes(world_size, permuted=united)))
    members: list[Any] = [
        draw(terms(draw(st.sampled_from(roots)), missing)) for _ in range(draw(st.integers(1, 3)))
    ]
    members += [draw(specs(draw(st.sampled_from(roots)), missing)) for _ in range(draw(st.integers(0, 2)))]
    if several:  # one parameter on each whole mesh closes the union of them
        for root in roots:
            layout = Layout(root, (Shard(0), *[Replicate()] * (root.ndim - 1)), (3, 2))
            values = np.arange(6.0).reshape(3, 2)
            members.append(Spec(values, (layout,) * world_size, (True,) * world_size))
    order = draw(st.permutations(members))
    return PartialCase(world_size, tuple(order), united, draw(st.sampled_from([1, 3, 7, 10**6])))

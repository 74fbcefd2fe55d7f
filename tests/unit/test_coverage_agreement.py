"""Sweep, layouts and a bitmap agree on what covers a tensor, on sound tables and on broken ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.coverage import (
    CoverageError,
    LocalShard,
    Table,
    check_coverage,
    local_shard,
    unpack_areas,
)
from hyper_parallel.core.layout import Area, Layout
from hyper_parallel.core.plan import TensorMeta
from hyper_parallel.core.staged import layout_replicas
from tests.unit.test_layout import layouts

bounded = settings(max_examples=400, deadline=None, derandomize=True)

Held = dict[int, tuple[Area, ...]]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Painted:
    """What painting all distinct shards one element at a time shows."""

    counts: np.ndarray
    outside: frozenset[Area]
    overlapping: frozenset[Area]

    @property
    def missing(self) -> int:
        return int((self.counts == 0).sum())


def window(area: Area) -> tuple[slice, ...]:
    """Its elements in an array, which drops those beyond its end by itself."""
    return tuple(slice(max(o, 0), max(o + s, 0)) for o, s in zip(area.offsets, area.sizes, strict=True))


def paint(shape: Sequence[int], held: Mapping[int, tuple[Area, ...]]) -> Painted:
    shards = {tuple(area for area in areas if 0 not in area.sizes) for areas in held.values()}
    areas = list(chain.from_iterable(shards))
    formed = [a for a in areas if len(a.offsets) == len(a.sizes) == len(shape) and min((*a.sizes, 1)) > 0]
    counts = np.zeros(tuple(shape), int)
    for area in formed:
        counts[window(area)] += 1
    inside = {area for area in formed if counts[window(area)].size == prod(area.sizes)}
    inside -= {area for area in formed if min(area.offsets, default=0) < 0}
    overlapping = {area for area in formed if (counts[window(area)] > 1).any()}
    return Painted(counts, frozenset(areas) - inside, frozenset(overlapping))


def assert_agreement(shape: Sequence[int], held: Held) -> None:
    tables = {rank: Table.of({"w": LocalShard(tuple(shape), areas)}) for rank, areas in held.items()}
    shards, errors = check_coverage(tables, held)
    painted = paint(shape, held)
    kinds: dict[str, list[CoverageError]] = {kind: [] for kind in ("bounds", "overlap", "hole")}
    for error in errors:
        kinds[error.kind].append(error)
        assert error.fqn == "w"
    assert {area for error in kinds["bounds"] for area in error.areas} == painted.outside
    assert {area for error in kinds["overlap"] for area in error.areas} == painted.overlapping
    for error in kinds["overlap"]:
        one, other = (np.zeros(painted.counts.shape, bool) for _ in range(2))
        one[window(error.areas[0])] = other[window(error.areas[1])] = True
        assert (one & other).any()
    assert bool(kinds["hole"]) == bool(painted.missing)
    for error in kinds["hole"]:
        assert f" {painted.missing} of {prod(shape)} elements " in error.reason
        hole = painted.counts[window(error.areas[0])]
        assert hole.size == prod(error.areas[0].sizes) > 0
        assert not hole.any()
    assert sorted(chain.from_iterable(shards["w"].values())) == sorted(held)


def held_by(layout: Layout) -> Held:
    return {rank: layout.areas(rank) for rank in layout.mesh.ranks}


def holders(layout: Layout) -> dict[tuple[Area, ...], tuple[int, ...]]:
    found: dict[tuple[Area, ...], tuple[int, ...]] = {}
    for rank in sorted(layout.mesh.ranks):
        found[layout.areas(rank)] = (*found.get(layout.areas(rank), ()), rank)
    return found


@bounded
@given(layouts())
def test_layouts_cover_exactly_and_name_the_copies_that_the_sweep_finds(layout: Layout) -> None:
    tables = {rank: Table.of({"w": local_shard(layout, rank)}) for rank in layout.mesh.ranks}
    shards, errors = check_coverage(tables, layout.mesh.ranks)
    assert errors == ()
    meta = TensorMeta("w", layout.global_shape, layout)
    for rank in layout.mesh.ranks:
        (copies,) = layout_replicas([meta], rank, tuple(sorted(layout.mesh.ranks)))
        assert copies == tuple(r for r in sorted(layout.mesh.ranks) if layout.chunk(r) == layout.chunk(rank))
        if layout.areas(rank):
            assert [copies] == [those for those in shards["w"].values() if rank in those]
    assert {unpack_areas(record): those for record, those in shards["w"].items()} == holders(layout)
    painted = paint(layout.global_shape, held_by(layout))
    assert (painted.counts == 1).all()
    assert not painted.outside


def broken(draw: st.DrawFn, held: Held, ndim: int) -> Held:
    """Shift, grow, drop, double or misshape some areas of some ranks."""
    held = dict(held)
    for _ in range(draw(st.integers(1, 3))):
        rank = draw(st.sampled_from(sorted(held)))
        areas = list(held[rank])
        change = draw(st.sampled_from(["shift", "grow", "drop", "double", "other", "misshape"]))
        if change == "other" or not areas:
            held[rank] = held[draw(st.sampled_from(sorted(held)))]
            continue
        area = areas.pop(draw(st.integers(0, len(areas) - 1)))
        by = tuple(draw(st.integers(-2, 2)) for _ in range(ndim))
        offsets = tuple(map(sum, zip(area.offsets, by, strict=False)))
        sizes = tuple(map(sum, zip(area.sizes, by, strict=False)))
        areas += {
            "shift": [Area(offsets, area.sizes)],
            "grow": [Area(area.offsets, sizes)],
            "double": [area, area],
            "misshape": [Area((*area.offsets, 0), (*area.sizes, 1))],
        }.get(change, [])
        held[rank] = tuple(areas)
    return held


@st.composite
def broken_layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], Held]:
    layout = draw(layouts())
    return layout.global_shape, broken(draw, held_by(layout), len(layout.global_shape))


@bounded
@given(broken_layouts())
def test_sweep_and_bitmap_agree_on_broken_layouts(case: tuple[tuple[int, ...], Held]) -> None:
    assert_agreement(*case)


def mosaic(draw: st.DrawFn, cell: Spans, depth: int) -> list[Spans]:
    """Boxes that tile ``cell`` and are no grid: each is cut on its own."""
    cuttable = [dim for dim, (start, stop) in enumerate(cell) if stop - start > 1]
    if not depth or not cuttable:
        return [cell]
    dim = draw(st.sampled_from(cuttable))
    start, stop = cell[dim]
    cut = draw(st.integers(start + 1, stop - 1))
    halves = ((*cell[:dim], span, *cell[dim + 1 :]) for span in ((start, cut), (cut, stop)))
    return [box for half in halves for box in mosaic(draw, half, depth - 1)]


@st.composite
def mosaics(draw: st.DrawFn) -> tuple[tuple[int, ...], Held]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    boxes = draw(st.permutations(mosaic(draw, tuple((0, size) for size in shape), draw(st.integers(0, 5)))))
    number = draw(st.integers(1, len(boxes)))
    held: Held = dict.fromkeys(range(number + 1), ())
    for index, box in enumerate(boxes):
        area = Area(tuple(start for start, _ in box), tuple(stop - start for start, stop in box))
        held[index % number] += (area,)
    return shape, held


@bounded
@given(mosaics())
def test_sweep_and_bitmap_agree_that_mosaics_cover(case: tuple[tuple[int, ...], Held]) -> None:
    shape, held = case
    tables = {rank: Table.of({"w": LocalShard(shape, areas)}) for rank, areas in held.items()}
    assert check_coverage(tables, held)[1] == ()
    assert_agreement(shape, held)


@st.composite
def broken_mosaics(draw: st.DrawFn) -> tuple[tuple[int, ...], Held]:
    shape, held = draw(mosaics())
    return shape, broken(draw, held, len(shape))


@bounded
@given(broken_mosaics())
def test_sweep_and_bitmap_agree_on_broken_mosaics(case: tuple[tuple[int, ...], Held]) -> None:
    assert_agreement(*case)


@st.composite
def scattered(draw: st.DrawFn) -> tuple[tuple[int, ...], Held]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    point = st.tuples(*(st.integers(-1, size) for size in shape))
    extent = st.tuples(*(st.integers(-1, size + 1) for size in shape))
    area = st.builds(Area, point, extent)
    ranks = draw(st.integers(1, 12))
    return shape, {rank: tuple(draw(st.lists(area, max_size=3))) for rank in range(ranks)}


@bounded
@given(scattered())
def test_sweep_and_bitmap_agree_on_areas_at_random(case: tuple[tuple[int, ...], Held]) -> None:
    assert_agreement(*case)

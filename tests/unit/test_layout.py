"""Layouts against index arrays, and coverage by painting every area into a global array."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.layout import Area, Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Partial, Replicate, Shard, StridedShard
from tests.unit.brute_force import coordinate_in, held_grid, held_indices

bounded = settings(max_examples=300, deadline=None, derandomize=True)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    size = prod(mesh_shape)
    ranks = draw(st.one_of(st.just(range(size)), st.permutations(range(size))))
    shape = tuple(draw(st.lists(st.integers(0, 11), max_size=3)))
    kinds = [Replicate(), Partial()]
    for dim in range(len(shape)):
        kinds += [Shard(dim), *(StridedShard(dim, split_factor=factor) for factor in (1, 2, 3))]
    placements = tuple(draw(st.sampled_from(kinds)) for _ in mesh_shape)
    return Layout(Mesh(mesh_shape, tuple(ranks)), placements, shape)


def slices(area: Area) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(area.offsets, area.sizes, strict=True))


@bounded
@given(layouts())
def test_local_shapes_are_those_of_the_index_arrays(layout: Layout) -> None:
    for rank in layout.mesh.ranks:
        here = coordinate_in(layout.mesh.shape, layout.mesh.ranks, rank)
        held = held_indices(layout.global_shape, layout.mesh.shape, layout.placements, here)
        assert layout.local_shape(rank) == tuple(len(indices) for indices in held)


@bounded
@given(layouts())
def test_areas_put_together_in_order_are_the_local_tensor(layout: Layout) -> None:
    whole = np.arange(prod(layout.global_shape)).reshape(layout.global_shape)
    for rank in layout.mesh.ranks:
        expected = whole[held_grid(layout, rank)]
        areas = layout.areas(rank)
        assert sum(prod(area.sizes) for area in areas) == expected.size
        assert all(min(area.sizes, default=1) > 0 for area in areas)
        pieces = [whole[slices(area)] for area in areas]
        starts = sorted({area.offsets for area in areas})
        assert [area.offsets for area in areas] == starts
        assert sorted(np.concatenate([np.zeros(0), *(p.reshape(-1) for p in pieces)])) == sorted(
            expected.reshape(-1)
        )


@bounded
@given(layouts())
def test_every_element_is_held_by_exactly_one_distinct_chunk(layout: Layout) -> None:
    held = {layout.chunk(rank): layout.areas(rank) for rank in layout.mesh.ranks}
    assert set(held) == set(range(layout.num_chunks))
    counts = np.zeros(layout.global_shape, int)
    for areas in held.values():
        for area in areas:
            counts[slices(area)] += 1
    assert (counts == 1).all()


@bounded
@given(layouts())
def test_ranks_of_one_chunk_are_copies_and_all_chunks_have_as_many(layout: Layout) -> None:
    members: dict[int, list[int]] = {}
    for rank in layout.mesh.ranks:
        members.setdefault(layout.chunk(rank), []).append(rank)
    for ranks in members.values():
        assert len({layout.areas(rank) for rank in ranks}) == 1
        assert len(ranks) * layout.num_chunks == layout.mesh.size


@bounded
@given(layouts())
def test_shard_and_partial_dims_follow_the_placements(layout: Layout) -> None:
    kinds = [type(placement).__name__ for placement in layout.placements]
    assert layout.shard_dims == tuple(d for d, kind in enumerate(kinds) if kind in ("Shard", "StridedShard"))
    assert layout.partial_dims == tuple(d for d, kind in enumerate(kinds) if kind == "Partial")


def test_uneven_chunks_are_full_then_short_then_empty() -> None:
    layout = Layout(Mesh((4,), (0, 1, 2, 3)), (Shard(0),), (5,))
    assert [layout.local_shape(rank) for rank in range(4)] == [(2,), (2,), (1,), (0,)]
    assert layout.areas(3) == ()


def test_several_mesh_dims_shard_one_dim_from_left_to_right() -> None:
    layout = Layout(Mesh((2, 2), (0, 1, 2, 3)), (Shard(0), Shard(0)), (5,))
    assert [layout.areas(rank) for rank in range(4)] == [
        (Area((0,), (2,)),),
        (Area((2,), (1,)),),
        (Area((3,), (1,)),),
        (Area((4,), (1,)),),
    ]


def test_the_strided_example_of_the_docstring() -> None:
    layout = Layout(Mesh((2, 2), (0, 1, 2, 3)), (StridedShard(0, split_factor=2), Shard(0)), (8,))
    assert [layout.areas(rank)[0].offsets[0] for rank in range(4)] == [0, 4, 2, 6]


def test_a_strided_shard_alone_holds_several_areas() -> None:
    layout = Layout(Mesh((2,), (0, 1)), (StridedShard(0, split_factor=2),), (8, 3))
    assert layout.areas(1) == (Area((2, 0), (2, 3)), Area((6, 0), (2, 3)))
    assert layout.local_shape(1) == (4, 3)


def test_a_0d_tensor_is_one_area_everywhere() -> None:
    layout = Layout(Mesh((2,), (0, 1)), (Replicate(),), ())
    assert layout.areas(0) == layout.areas(1) == (Area((), ()),)
    assert layout.num_chunks == 1


def test_negative_dims_are_stored_as_positive_ones() -> None:
    mesh = Mesh((2, 1), (0, 1))
    negative = Layout(mesh, (Shard(-1), StridedShard(-2, split_factor=2)), (4, 6))
    assert negative == Layout(mesh, (Shard(1), StridedShard(0, split_factor=2)), (4, 6))


@pytest.mark.parametrize("placement", [Shard(2), Shard(-3), StridedShard(5)])
def test_a_dim_that_the_tensor_lacks(placement: Shard) -> None:
    with pytest.raises(ValueError, match=r"names a dim that a tensor of shape \(4, 4\) lacks"):
        Layout(Mesh((2,), (0, 1)), (placement,), (4, 4))


def test_sharding_a_0d_tensor() -> None:
    with pytest.raises(ValueError, match=r"Shard\(dim=0\) names a dim that a tensor of shape \(\) lacks"):
        Layout(Mesh((2,), (0, 1)), (Shard(0),), ())


def test_placements_that_are_not_as_many_as_mesh_dims() -> None:
    with pytest.raises(ValueError, match=r"2 placements .* for a mesh of 1 dimensions"):
        Layout(Mesh((2,), (0, 1)), (Shard(0), Replicate()), (4,))


@pytest.mark.parametrize("wrong", ["Shard(0)", None, 0])
def test_what_is_no_placement(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected Shard, StridedShard, Replicate or Partial"):
        Layout(Mesh((2,), (0, 1)), (wrong,), (4,))  # type: ignore[arg-type]


def test_a_rank_outside_the_mesh() -> None:
    layout = Layout(Mesh((2,), (2, 5)), (Shard(0),), (4,))
    for method in (layout.areas, layout.local_shape, layout.chunk):
        with pytest.raises(ValueError, match=r"rank 0 is not in the mesh of ranks \(2, 5\)"):
            method(0)

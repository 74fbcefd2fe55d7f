"""Every kind of coverage error by example."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

from hyper_parallel.core.coverage import (
    PRINTED,
    Areas,
    CoverageError,
    LocalShard,
    Table,
    check_coverage,
    local_shard,
    pack_areas,
    unpack_areas,
    verify_coverage,
)
from hyper_parallel.core.layout import Area, Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Shard, StridedShard

PAIR = Mesh((2,), (0, 1))


def rows(start: int, stop: int, width: int = 4) -> Area:
    return Area((start, 0), (stop - start, width))


def one(
    held: Mapping[int, tuple[Area, ...]], shape: tuple[int, ...] = (8, 4)
) -> dict[int, dict[str, LocalShard]]:
    """Tables with one parameter ``w``."""
    return {rank: {"w": LocalShard(shape, areas)} for rank, areas in held.items()}


def errors_in(
    tables: Mapping[int, Mapping[str, LocalShard]], ranks: Collection[int]
) -> tuple[CoverageError, ...]:
    return check_coverage({rank: Table.of(shards) for rank, shards in tables.items()}, ranks)[1]


def verified(
    tables: Mapping[int, Mapping[str, LocalShard]], ranks: Collection[int]
) -> dict[str, list[tuple[Areas, tuple[int, ...]]]]:
    shards = verify_coverage({rank: Table.of(shards) for rank, shards in tables.items()}, ranks)
    return {fqn: [(unpack_areas(r), those) for r, those in held.items()] for fqn, held in shards.items()}


def errors_of(
    held: Mapping[int, tuple[Area, ...]], shape: tuple[int, ...] = (8, 4)
) -> tuple[CoverageError, ...]:
    return errors_in(one(held, shape), held)


def laid_out(layout: Layout) -> dict[int, dict[str, LocalShard]]:
    return {rank: {"w": local_shard(layout, rank)} for rank in layout.mesh.ranks}


def test_copies_are_listed_by_shard_with_the_smallest_rank_first() -> None:
    held = {3: (rows(0, 4),), 1: (rows(0, 4),), 0: (rows(4, 8),), 2: (rows(4, 8),)}
    assert verified(one(held), [3, 2, 1, 0]) == {"w": [((rows(4, 8),), (0, 2)), ((rows(0, 4),), (1, 3))]}


def test_a_strided_shard_holds_several_areas() -> None:
    layout = Layout(PAIR, (StridedShard(0, split_factor=2),), (8, 4))
    assert verified(laid_out(layout), PAIR.ranks)["w"] == [
        ((rows(0, 2), rows(4, 6)), (0,)),
        ((rows(2, 4), rows(6, 8)), (1,)),
    ]


@pytest.mark.parametrize(
    ("shape", "areas", "number"),
    [
        ((), (Area((), ()),), 1),
        ((0,), (), 1),
        ((3, 0), (Area((0, 0), (3, 0)),), 1),
        ((4,), (Area((0,), (2,)), Area((2,), (2,))), 1),
    ],
)
def test_a_tensor_of_one_rank(shape: tuple[int, ...], areas: tuple[Area, ...], number: int) -> None:
    assert len(verified(one({5: areas}, shape), [5])["w"]) == number


def test_ranks_that_hold_nothing_are_copies_wherever_their_areas_would_start() -> None:
    held = {0: (rows(0, 8),), 1: (), 2: (Area((8, 0), (0, 4)),), 3: (Area((3, 0), (0, 4)),)}
    assert verified(one(held), held)["w"] == [((rows(0, 8),), (0,)), ((), (1, 2, 3))]


def test_nothing_to_check() -> None:
    assert verified({}, []) == {}
    assert verified({0: {}, 1: {}}, [0, 1]) == {}


def test_blocks_that_are_no_grid() -> None:
    areas = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    pinwheel = {rank: (Area(*area),) for rank, area in enumerate(areas)}
    assert errors_of(pinwheel, (3, 3)) == ()


def test_a_hole_names_the_missing_elements_and_where_some_are() -> None:
    (error,) = errors_of({0: (rows(0, 3),), 1: (rows(5, 8),)})
    assert (error.kind, error.fqn, error.ranks, error.areas) == ("hole", "w", (0, 1), (rows(3, 5),))
    assert error.reason == (
        "w: 8 of 32 elements are missing on ranks 0, 1, among them Area(offsets=(3, 0), sizes=(2, 4))"
    )


def test_a_0d_tensor_that_nobody_holds() -> None:
    (error,) = errors_of({0: (), 1: ()}, ())
    assert (error.kind, error.areas) == ("hole", (Area((), ()),))
    assert error.reason.startswith("w: 1 of 1 elements are missing on ranks 0, 1")


def test_a_partial_overlap_names_both_shards() -> None:
    (error,) = errors_of({0: (rows(0, 5),), 1: (rows(4, 8),), 2: (rows(4, 8),)})
    assert (error.kind, error.fqn, error.ranks) == ("overlap", "w", (0, 1, 2))
    assert error.areas == (rows(0, 5), rows(4, 8))
    assert error.reason == (
        "w: Area(offsets=(0, 0), sizes=(5, 4)) on rank 0 overlaps "
        "Area(offsets=(4, 0), sizes=(4, 4)) on ranks 1, 2"
    )


def test_the_same_elements_as_other_areas_are_no_copy() -> None:
    (first, second) = errors_of({0: (rows(0, 4), rows(4, 8)), 1: (rows(0, 8),)})
    assert {first.kind, second.kind} == {"overlap"}


def test_an_area_that_one_rank_holds_twice() -> None:
    (error,) = errors_of({0: (rows(0, 4), rows(0, 4)), 1: (rows(4, 8),)})
    assert (error.kind, error.ranks, error.areas) == ("overlap", (0,), (rows(0, 4), rows(0, 4)))


def test_every_shard_in_an_overlap_is_named() -> None:
    columns = {rank: (Area((0, rank), (8, 1)),) for rank in range(4)}
    found = errors_of({**columns, 4: (rows(2, 6),)})
    assert {rank for error in found for rank in error.ranks} == {0, 1, 2, 3, 4}
    assert {error.kind for error in found} == {"overlap"}
    assert all(4 in error.ranks for error in found)


@pytest.mark.parametrize(
    "wrong",
    [
        Area((6, 0), (4, 4)),
        Area((-1, 0), (9, 4)),
        Area((8, 4), (-8, -4)),
        Area((0,), (8,)),
        Area((0, 0, 0), (8, 4, 1)),
        Area((0, 0), (8,)),
    ],
    ids=str,
)
def test_an_area_out_of_bounds(wrong: Area) -> None:
    found = errors_of({0: (rows(0, 8),), 1: (wrong,)})
    (error,) = [error for error in found if error.kind == "bounds"]
    assert (error.fqn, error.ranks, error.areas) == ("w", (1,), (wrong,))
    assert error.reason == f"w: {wrong} on rank 1 lies outside of the global shape (8, 4)"


def test_what_lies_inside_of_an_area_out_of_bounds_counts() -> None:
    assert [error.kind for error in errors_of({0: (rows(0, 4),), 1: (rows(4, 9),)})] == ["bounds"]
    assert [error.kind for error in errors_of({0: (rows(-2, 2),), 1: (rows(4, 8),)})] == ["bounds", "hole"]


def test_a_size_below_zero_that_would_add_up() -> None:
    assert [error.kind for error in errors_of({0: (rows(0, 9),), 1: (rows(9, 8),)})] == ["bounds", "bounds"]


def test_different_global_shapes() -> None:
    tables = one({0: (rows(0, 4),), 1: (rows(4, 8),)}) | one({2: ()}, (8, 5))
    (error,) = errors_in(tables, range(3))
    assert (error.kind, error.fqn, error.ranks) == ("shapes", "w", (0, 1, 2))
    assert error.reason == "w: global shape (8, 4) on ranks 0, 1, (8, 5) on rank 2; areas are not compared"


def test_a_global_shape_below_zero() -> None:
    assert [error.kind for error in errors_of({0: ()}, (-1, 4))] == ["shapes"]


def test_fqns_that_only_some_ranks_have() -> None:
    tables = one({0: (rows(0, 4),), 1: (rows(4, 8),)})
    tables[1]["bias"] = LocalShard((2,), (Area((0,), (2,)),))
    tables[2] = {}
    found = errors_in(tables, range(3))
    assert [(error.kind, error.fqn, error.ranks) for error in found] == [
        ("fqns", "w", (2,)),
        ("fqns", "bias", (0, 2)),
    ]
    assert found[1].reason == "bias: missing on ranks 0, 2, present on rank 1 of the same stage"


def test_ranks_outside_of_the_stage_and_ranks_without_a_table() -> None:
    found = errors_in(one({0: (rows(0, 4),), 1: (rows(4, 8),), 9: (rows(0, 8),)}), (0, 1, 2))
    assert [(error.kind, error.ranks) for error in found] == [("ranks", (2,)), ("ranks", (9,))]
    assert found[0].reason == "rank 2 is without a table, but a member of the stage of ranks 0, 1, 2"
    assert found[1].reason == "rank 9 is outside of the stage of ranks 0, 1, 2"


def test_a_rank_outside_of_its_mesh() -> None:
    layout = Layout(Mesh((2,), (0, 2)), (Shard(0),), (8, 4))
    tables = {rank: {"w": local_shard(layout, rank)} for rank in range(3)}
    (error,) = errors_in(tables, range(3))
    assert (error.kind, error.fqn, error.ranks) == ("local", "w", (1,))
    assert error.reason == "w: rank 1: outside of its mesh of ranks 0, 2"


def test_a_problem_hides_the_hole_that_it_makes_but_no_overlap() -> None:
    tables = one({0: (rows(0, 4),), 1: (rows(3, 4),)})
    tables[1]["w"] = replace(tables[1]["w"], problem="the local tensor is of another shape")
    assert [error.kind for error in errors_in(tables, range(2))] == ["local", "overlap"]


def test_a_problem_that_only_one_of_two_copies_has() -> None:
    entry = LocalShard((8, 4), (rows(0, 8),))
    tables = {0: {"w": entry, "v": entry}, 1: {"w": replace(entry, problem="bad"), "v": entry}}
    (error,) = errors_in(tables, range(2))
    assert (error.kind, error.fqn, error.ranks, error.reason) == ("local", "w", (1,), "w: rank 1: bad")


def test_all_errors_come_at_once_and_some_of_each_kind_in_full() -> None:
    tables = one({0: (rows(0, 5),), 1: (rows(4, 7),)})
    for table in tables.values():
        table.update({f"layer.{number}": table["w"] for number in range(20)})
    with pytest.raises(ValueError, match="42 errors") as raised:
        verified(tables, range(2))
    lines = str(raised.value).split("\n  ")
    assert len(lines) == 1 + 2 * (PRINTED + 1)
    assert "and 16 more errors of kind hole" in lines
    assert "and 16 more errors of kind overlap" in lines
    assert {error.fqn for error in errors_in(tables, range(2))} == set(tables[0])


@pytest.mark.parametrize(
    "areas", [(), (rows(0, 3), rows(5, 8)), (Area((), ()),), (Area((-1, 2**40), (8,)), rows(0, 1))], ids=str
)
def test_areas_survive_packing(areas: Areas) -> None:
    assert unpack_areas(pack_areas(areas)) == areas
    assert pack_areas((Area((3, 0), (0, 4)), *areas)) == pack_areas(areas)


def test_a_table_is_received_as_it_was_sent() -> None:
    table = Table.of({"w": LocalShard((8, 4), (rows(0, 8),)), "v": LocalShard((2,), (), "bad")})
    assert Table.received(table.sent()) == table
    assert (table.fqns, table.shapes, table.problems) == (("w", "v"), ((8, 4), (2,)), {"v": "bad"})


@pytest.mark.parametrize(
    "areas",
    [
        (Area((0,), (8, 8, 3)),),
        (Area((0, 0), (4,)), Area((0, 4, 0), (4, 3))),
        (Area((0,), (8,)), Area((0,), (4,))),
    ],
    ids=str,
)
def test_areas_that_would_be_well_formed_if_their_numbers_ran_on(areas: Areas) -> None:
    found = errors_of({0: areas}, (8, 3))
    assert [error.kind for error in found] == ["bounds"] * len(areas) + ["hole"]


def test_an_area_whose_corners_would_fit_in_the_next_row() -> None:
    found = errors_of({0: (Area((0, 0), (8, 2)),), 1: (Area((9, 1), (8, 2)),)})
    assert [error.kind for error in found] == ["bounds", "hole"]


def test_ranks_that_list_other_parameters_are_checked_together() -> None:
    entry = {rank: LocalShard((8, 4), (rows(0, 4) if rank else rows(4, 8),)) for rank in range(6)}
    tables = {rank: Table.of({"w": entry[rank]}) for rank in (0, 2, 5)}
    tables[3] = Table.of({"v": LocalShard((8, 4), (rows(0, 8),)), "w": entry[3]})
    tables[4] = Table.of({})
    shards, errors = check_coverage(tables, (0, 2, 3, 4, 5))
    assert list(shards["w"].values()) == [(0,), (2, 3, 5)]
    assert [(error.kind, error.fqn, error.ranks) for error in errors] == [
        ("fqns", "w", (4,)),
        ("fqns", "v", (0, 2, 4, 5)),
    ]

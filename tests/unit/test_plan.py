"""The plan: which ranks finish together, what each contributes, and that all of them agree."""

from __future__ import annotations

from fractions import Fraction

import pytest

from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Replicate, Shard
from hyper_parallel.core.plan import Part, ReductionPlan, TensorMeta, build_plan
from tests.unit.plans import ROOT, WORLD, meta, only_part, plans, sliced


def weight_of(part: Part, index: int) -> Fraction:
    return next(Fraction(term.weight, part.divisor) for term in part.terms if index in term.indices)


# ---- which ranks finish together


def test_one_mesh_of_the_whole_world_is_one_all_reduce() -> None:
    found = plans(lambda rank: [meta("w", WORLD, Shard(0)), meta("b", None)], range(8), [tuple(range(8))])
    for plan in found.values():
        assert only_part(plan).steps == (tuple(range(8)),)
    assert len({only_part(plan).digest for plan in found.values()}) == 1


def test_without_a_group_of_all_ranks_one_mesh_dim_after_another() -> None:
    found = plans(lambda rank: [meta("w", ROOT, Shard(0), Replicate(), Shard(1))], range(8))
    for rank, plan in found.items():
        part = only_part(plan)
        assert part.steps == tuple(tuple(sorted(ROOT.slice_ranks(rank, (d,)))) for d in range(3))


def test_steps_along_dims_of_size_1_are_left_out() -> None:
    mesh = Mesh((1, 2, 1), (0, 1))
    plan = build_plan((meta("w", mesh, Replicate(), Shard(0), Replicate()),), 1, frozenset())
    assert only_part(plan).steps == ((0, 1),)


def test_a_mesh_of_this_rank_alone_communicates_nothing() -> None:
    plan = build_plan((meta("w", Mesh((1,), (3,)), Shard(0)), meta("b", None)), 3, frozenset({(0, 3)}))
    assert only_part(plan).steps == ()


def test_plain_tensors_alone_communicate_nothing() -> None:
    for rank, plan in plans(
        lambda rank: [meta("a", None), meta("b", None)], range(4), [(0, 1, 2, 3)]
    ).items():
        part = only_part(plan)
        assert (part.steps, part.copies, part.indices) == ((), (), (0, 1)), rank


def test_no_tensors_at_all() -> None:
    part = only_part(build_plan((), 5, frozenset({(4, 5)})))
    assert (part.steps, part.indices, part.divisor) == ((), (), 1)


def test_slices_of_one_root_span_the_dims_they_use_and_no_unused_pipeline_dim() -> None:
    def build(rank: int) -> list[TensorMeta]:
        return [
            meta("a", sliced(ROOT, rank, "dp"), Shard(0)),
            meta("b", sliced(ROOT, rank, "tp"), Shard(0)),
        ]

    for rank, plan in plans(build, range(8), [(0, 1, 2, 3), (4, 5, 6, 7)]).items():
        stage = (0, 1, 2, 3) if rank < 4 else (4, 5, 6, 7)
        assert only_part(plan).steps == (stage,)


def test_slices_without_a_group_of_their_union_step_along_the_dims_of_the_root() -> None:
    tensors = (meta("a", sliced(ROOT, 6, "dp"), Shard(0)), meta("b", sliced(ROOT, 6, "tp"), Shard(0)))
    assert only_part(build_plan(tensors, 6, frozenset())).steps == ((4, 6), (6, 7))


def test_one_slice_alone_spans_itself() -> None:
    for rank, plan in plans(lambda rank: [meta("a", sliced(ROOT, rank, "tp"), Shard(0))], range(8)).items():
        assert only_part(plan).steps == ((rank // 2 * 2, rank // 2 * 2 + 1),)


def test_independent_meshes_of_the_whole_world() -> None:
    dense, experts = Mesh((4,), (0, 1, 2, 3), ("dp",)), Mesh((2, 2), (0, 1, 2, 3), ("edp", "ep"))
    tensors = (meta("dense", dense, Shard(0)), meta("expert", experts, Replicate(), Shard(0)))
    for rank in range(4):
        part = only_part(build_plan(tensors, rank, frozenset({(0, 1, 2, 3)})))
        assert part.steps == ((0, 1, 2, 3),)
        assert weight_of(part, 0) == 1
        assert weight_of(part, 1) == Fraction(1, 2)


def test_a_mesh_that_covers_the_others_closes_the_union() -> None:
    small = Mesh((2,), (0, 2), ("x",))
    part = only_part(build_plan((meta("a", WORLD, Shard(0)), meta("b", small, Shard(0))), 2, frozenset()))
    assert part.steps == (tuple(range(8)),)


def crossing(rank: int) -> list[TensorMeta]:
    """Meshes of two ranks without a root: no rank can know the union."""
    tp = Mesh((2,), (rank // 2 * 2, rank // 2 * 2 + 1), ("tp",))
    dp = Mesh((2,), (rank % 2, rank % 2 + 2), ("dp",))
    return [meta("a", dp, Shard(0)), meta("b", tp, Shard(0)), meta("c", None)]


def test_a_union_that_is_not_closed_falls_back_to_one_part_per_mesh() -> None:
    for rank, plan in plans(crossing, range(4)).items():
        tp, dp = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        found = {part.indices: part.steps for part in plan.parts}
        assert found == {(0,): (dp,), (1,): (tp,), (2,): ()}
        assert all(weight_of(part, part.indices[0]) == 1 for part in plan.parts)


def assert_no_deadlock(found: dict[int, ReductionPlan]) -> None:
    """Run the collectives: a step is done when it is the next one of all of its ranks."""
    waiting = {rank: [step for part in plan.parts for step in part.steps] for rank, plan in found.items()}
    while any(waiting.values()):
        ready = {
            s[0] for s in waiting.values() if s and all(waiting[r] and waiting[r][0] == s[0] for r in s[0])
        }
        assert ready, f"nobody can go on: {waiting}"
        for step in ready:
            for rank in step:
                waiting[rank].pop(0)


def test_the_parts_come_in_an_order_that_cannot_deadlock() -> None:
    assert_no_deadlock(plans(crossing, range(4)))
    assert_no_deadlock(plans(lambda rank: crossing(rank)[:: -1 if rank in (0, 3) else 1], range(4)))


def test_rings_of_pairs_cannot_deadlock() -> None:
    def build(rank: int) -> list[TensorMeta]:
        pairs = [tuple(sorted((rank, (rank + step) % 5))) for step in (1, -1)]
        return [meta(f"{pair}", Mesh((2,), pair), Shard(0)) for pair in pairs]

    assert_no_deadlock(plans(build, range(5)))


def test_slices_of_two_roots_are_not_taken_for_slices_of_one() -> None:
    """Rank 0 could take both of its meshes for slices of ROOT; rank 2 could not."""
    other = Mesh((2, 2), (0, 1, 2, 5), ("x", "y"))

    def build(rank: int) -> list[TensorMeta]:
        found = [meta("a", sliced(ROOT, rank, "dp"), Shard(0))]
        return [*found, meta("b", sliced(other, rank, "y"), Shard(0))] if rank in other.ranks else found

    found = plans(build, range(8))
    assert {rank: len(plan.parts) for rank, plan in found.items() if rank in other.ranks} == dict.fromkeys(
        other.ranks, 2
    )
    assert_no_deadlock(found)


def test_equal_ranks_in_different_meshes_share_a_part() -> None:
    def build(rank: int) -> list[TensorMeta]:
        tp = (rank // 2 * 2, rank // 2 * 2 + 1)
        reverse = Mesh((2,), (tp[1], tp[0]))
        return [*crossing(rank), meta("d", reverse, Shard(0))]

    for plan in plans(build, range(4)).values():
        assert sorted(part.indices for part in plan.parts) == [(0,), (1, 3), (2,)]


def test_tensors_on_meshes_without_this_rank_take_no_part() -> None:
    tensors = (meta("here", Mesh((2,), (0, 1)), Shard(0)), meta("there", Mesh((2,), (2, 3)), Shard(0)))
    assert only_part(build_plan(tensors, 1, frozenset())).indices == (0,)
    assert only_part(build_plan(tensors, 3, frozenset())).indices == (1,)


def test_a_mesh_without_dims_holds_its_one_rank() -> None:
    tensors = (meta("w", Mesh((), (0,))),)
    assert only_part(build_plan(tensors, 0, frozenset())).indices == (0,)


# ---- what each contributes


@pytest.mark.parametrize(
    ("placements", "share"),
    [
        ((Shard(0), Shard(0), Shard(1)), Fraction(1)),
        ((Replicate(), Shard(0), Shard(1)), Fraction(1, 2)),
        ((Replicate(), Shard(0), Replicate()), Fraction(1, 4)),
        ((Replicate(), Replicate(), Replicate()), Fraction(1, 8)),
    ],
)
def test_copies_share_the_weight(placements: tuple, share: Fraction) -> None:
    for plan in plans(lambda rank: [meta("w", ROOT, *placements)], range(8)).values():
        assert weight_of(only_part(plan), 0) == share


def test_a_slice_is_replicated_over_the_rest_of_the_union() -> None:
    tensors = (meta("a", sliced(ROOT, 0, "dp"), Shard(0)), meta("b", sliced(ROOT, 0, "tp"), Replicate()))
    part = only_part(build_plan(tensors, 0, frozenset()))
    assert [weight_of(part, index) for index in (0, 1)] == [Fraction(1, 2), Fraction(1, 4)]


def test_weights_are_whole_numbers_so_that_counts_stay_exact() -> None:
    mesh = Mesh((2, 3), tuple(range(6)))
    tensors = (
        meta("a", mesh, Shard(0), Replicate()),
        meta("b", mesh, Replicate(), Shard(0)),
        meta("c", None),
    )
    part = only_part(build_plan(tensors, 0, frozenset()))
    assert all(isinstance(term.weight, int) for term in part.terms)
    assert [weight_of(part, index) for index in range(3)] == [Fraction(1, 3), Fraction(1, 2), Fraction(1, 6)]


def test_equal_slots_are_exactly_the_copies_of_one_chunk() -> None:
    def build(rank: int) -> list[TensorMeta]:
        return [
            meta("once", ROOT, Shard(0), Shard(0), Shard(1)),
            meta("a", ROOT, Replicate(), Shard(0), Shard(1)),
            meta("plain", None),
            meta("b", ROOT, Shard(1), Replicate(), Replicate()),
        ]

    held: dict[int, set] = {}
    found = plans(build, range(8))
    for rank, plan in found.items():
        for index, slot in only_part(plan).copies:
            layout = build(rank)[index].layout
            held.setdefault(slot, set()).add((index, None if layout is None else layout.areas(rank)))
    assert all(len(areas) == 1 for areas in held.values())
    assert len(held) == len({next(iter(areas)) for areas in held.values()}) == 4 + 1 + 2
    assert set(held) == set(range(only_part(found[0]).num_slots))
    assert all(0 not in dict(only_part(plan).copies) for plan in found.values())


def test_a_mesh_whose_sisters_cannot_fill_the_union_is_an_error_on_every_rank() -> None:
    mesh = Mesh((2,), (0, 1))
    tensors = (meta("w", Mesh((3,), (0, 1, 2)), Shard(0)), meta("odd", mesh, Shard(0)))
    (error,) = only_part(build_plan(tensors, 0, frozenset())).errors
    assert "odd lies on a mesh of 2 ranks" in error
    assert "3 ranks (0, 1, 2)" in error

"""Who holds the same, by layouts alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.plan import TensorMeta
from hyper_parallel.core.staged import layout_replicas
from hyper_parallel.core.union import Ranks
from tests.unit.plans import ROOT, meta

MESH = Mesh((2, 2), (0, 1, 2, 3))


def replicas(tensor: TensorMeta, rank: int, stage: Ranks) -> Ranks | None:
    (found,) = layout_replicas([tensor], rank, stage)
    return found


@pytest.mark.parametrize(
    ("placements", "groups"),
    [
        ((Replicate(), Replicate()), [(0, 1, 2, 3)]),
        ((Shard(0), Partial()), [(0, 1), (2, 3)]),
        ((Replicate(), Shard(1)), [(0, 2), (1, 3)]),
        ((StridedShard(0, split_factor=2), Shard(0)), [(0,), (1,), (2,), (3,)]),
    ],
    ids=str,
)
def test_the_copies_of_a_layout(placements: tuple[Placement, ...], groups: list[Ranks]) -> None:
    for ranks in groups:
        for rank in ranks:
            assert replicas(meta("w", MESH, *placements), rank, MESH.ranks) == ranks


def test_copies_are_sorted_where_a_mesh_is_not() -> None:
    tensor = meta("w", Mesh((2, 2), (3, 0, 1, 2)), Replicate(), Shard(0))
    assert [replicas(tensor, rank, (0, 1, 2, 3)) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_copies_of_each_of_several_tensors() -> None:
    layout = Layout(MESH, (Shard(0), Replicate()), (8, 4))
    tensors = [
        TensorMeta("w", (8, 4), layout),
        meta("plain", None),
        TensorMeta("v", (3, 3), replace(layout, global_shape=(3, 3))),
        meta("b", MESH, Replicate(), Shard(1)),
    ]
    assert layout_replicas(tensors, 1, MESH.ranks) == [(0, 1), (0, 1, 2, 3), (0, 1), (1, 3)]


def test_a_slice_of_a_root_has_copies_on_its_sisters() -> None:
    part = Mesh((2, 2), ROOT.slice_ranks(5, (1, 2)), None, ROOT)
    assert replicas(meta("w", part, Shard(0), Replicate()), 5, ROOT.ranks) == ROOT.slice_ranks(5, (0, 2))
    assert replicas(meta("w", part, Shard(0), Shard(1)), 5, ROOT.ranks) == ROOT.slice_ranks(5, (0,))
    assert replicas(meta("w", part, Shard(0), Shard(1)), 5, part.ranks) == (5,)


def test_a_dim_of_one_rank_cuts_nothing() -> None:
    mesh = Mesh((1, 4), (0, 1, 2, 3))
    assert replicas(meta("w", mesh, Shard(0), Replicate()), 2, mesh.ranks) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [
        (Mesh((2, 2), (0, 1, 2, 3)), tuple(range(8))),  # sisters that are not known
        (Mesh((4,), (0, 1, 2, 7), None, ROOT), ROOT.ranks),  # no slice of its root
        (Mesh((4,), (0, 1, 2, 3), None, ROOT), ROOT.ranks),  # flattened
        (ROOT, (0, 1, 2, 3)),  # ranks outside of the stage
    ],
)
def test_layouts_that_do_not_tell(mesh: Mesh, stage: Ranks) -> None:
    placements = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    assert replicas(meta("w", mesh, *placements), 1, stage) is None

"""The digest by which ranks see that their layouts agree."""

from __future__ import annotations

import pytest

from hyper_parallel.core.coverage import layout_digest
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Replicate, Shard, StridedShard
from tests.unit.plans import ROOT, WORLD, meta


def test_the_digest_tells_layouts_apart() -> None:
    mesh, turned = Mesh((2, 4), tuple(range(8))), Mesh((2, 4), (0, 1, 2, 3, 7, 6, 5, 4))
    tensors = [
        meta("w", mesh, Shard(0), Replicate()),
        meta("v", mesh, Shard(0), Replicate()),
        meta("w", mesh, Shard(1), Replicate()),
        meta("w", mesh, StridedShard(0, split_factor=2), Replicate()),
        meta("w", mesh, Shard(0), Replicate(), shape=(8, 5)),
        meta("w", turned, Shard(0), Replicate()),
        meta("w", None),
    ]
    assert len({layout_digest([tensor], range(8)) for tensor in tensors}) == len(tensors)
    assert layout_digest([], range(8)) != layout_digest([], range(4))


def test_sister_meshes_have_one_digest_by_their_root() -> None:
    def digests(*dims: int) -> set[int]:
        meshes = [Mesh((2, 2), ROOT.slice_ranks(rank, dims), None, ROOT) for rank in ROOT.ranks]
        return {layout_digest([meta("w", mesh, Shard(0), Shard(1))], ROOT.ranks) for mesh in meshes}

    assert len(digests(1, 2)) == len(digests(0, 2)) == 1
    assert digests(1, 2) != digests(0, 2)


def test_sister_meshes_without_a_root_have_one_digest() -> None:
    assert (
        len({layout_digest([meta("w", Mesh((2,), ranks), Shard(0))], range(4)) for ranks in ((0, 1), (2, 3))})
        == 1
    )


def test_a_layout_outside_of_the_stage() -> None:
    with pytest.raises(
        ValueError, match=r"a mesh has ranks 4, 5, 6, 7, outside of the stage of ranks 0, 1, 2, 3"
    ):
        layout_digest([meta("w", WORLD, Shard(0))], range(4))

"""Layouts against torch.distributed.tensor itself, over a grid of shapes, meshes and placements.

One process stands for every rank in turn: torch's splitting functions take a coordinate, and a fake process group
gives ``DTensor`` what it wants to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from hyper_parallel import Layout, Mesh, Partial, Placement, Replicate, Shard, StridedShard
from hyper_parallel.preparation import prepare
from hyper_parallel_torch.layouts import core_mesh, core_placement, torch_placement
from hyper_parallel_torch.platform import TorchPlatform

SHAPES = ((), (0,), (1,), (5,), (8,), (13,), (4, 3), (7, 2), (1, 6), (0, 3), (6, 5, 4))
MESH_SHAPES = ((1,), (2,), (3,), (5,), (2, 2), (3, 2), (2, 3), (1, 4), (2, 1, 2), (2, 2, 2))


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """This process is ``rank`` of a job whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def placements_for(ndim: int, mesh_ndim: int) -> list[tuple[Placement, ...]]:
    """Every combination on small meshes; on three mesh dims without the larger split factors."""
    factors = (2, 3) if mesh_ndim < 3 else (2,)
    kinds: list[Placement] = [Replicate()]
    for dim in range(ndim):
        kinds += [Shard(dim), *(StridedShard(dim, split_factor=factor) for factor in factors)]
    if mesh_ndim == 3:
        kinds = [Replicate(), *kinds[1:3], *kinds[4:5]]
    return list(product(kinds, repeat=mesh_ndim))


def torch_local(
    whole: torch.Tensor, mesh_shape: tuple[int, ...], placements: tuple, here: tuple[int, ...]
) -> Any:
    """Torch's own splitting, one placement after another, from left to right."""
    local = whole
    for number, placement, index in zip(mesh_shape, placements, here, strict=True):
        if placement.is_replicate():
            continue
        pieces, _ = placement._split_tensor(local, number, with_padding=False, contiguous=True)
        local = pieces[index]
    return local


def our_local(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """The areas of ``rank``, put together dim by dim."""
    areas = layout.areas(rank)
    local = whole
    for dim in range(whole.ndim):
        runs = sorted({(area.offsets[dim], area.sizes[dim]) for area in areas})
        indices = [index for start, size in runs for index in range(start, start + size)]
        local = local.index_select(dim, torch.tensor(indices, dtype=torch.long))
    return local.reshape(layout.local_shape(rank))


GRID = [(shape, mesh_shape) for shape in SHAPES for mesh_shape in MESH_SHAPES]


@pytest.mark.parametrize(("shape", "mesh_shape"), GRID, ids=str)
def test_content_of_every_rank_is_what_torch_splits_off(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> None:
    whole = torch.arange(prod(shape)).reshape(shape)
    mesh = Mesh(mesh_shape, tuple(range(prod(mesh_shape))))
    for placements in placements_for(len(shape), len(mesh_shape)):
        layout = Layout(mesh, placements, shape)
        theirs = tuple(map(torch_placement, placements))
        for rank in mesh.ranks:
            expected = torch_local(whole, mesh_shape, theirs, mesh.coordinate(rank) or ())
            assert layout.local_shape(rank) == tuple(expected.shape), (placements, rank)
            assert torch.equal(our_local(whole, layout, rank), expected), (placements, rank)


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (5,), (2, 2), (3, 2), (1, 4), (2, 1, 2)], ids=str)
def test_shapes_and_offsets_are_those_that_dtensor_computes(mesh_shape: tuple[int, ...]) -> None:
    world_size = prod(mesh_shape)
    for rank in range(world_size):
        with rank_of(rank, world_size):
            device_mesh = init_device_mesh("cpu", mesh_shape)
            mesh = core_mesh(device_mesh)
            for shape in SHAPES:
                for placements in placements_for(len(shape), len(mesh_shape)):
                    theirs = tuple(map(torch_placement, placements))
                    size, offset = compute_local_shape_and_global_offset(
                        torch.Size(shape), device_mesh, theirs
                    )
                    layout = Layout(mesh, placements, shape)
                    assert layout.local_shape(rank) == tuple(size), (shape, placements, rank)
                    if areas := layout.areas(rank):
                        assert areas[0].offsets == tuple(offset), (shape, placements, rank)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((4,), (Shard(0),)),
        ((2, 2), (Shard(0), Shard(0))),
        ((2, 2), (Shard(1), Replicate())),
        ((2, 3), (Replicate(), Shard(0))),
        ((2, 2), (Shard(1), Shard(0))),
    ],
    ids=str,
)
def test_the_platform_describes_real_dtensors_with_the_local_shape_they_have(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    whole = torch.arange(35.0).reshape(7, 5)
    for rank in range(prod(mesh_shape)):
        with rank_of(rank, prod(mesh_shape)):
            device_mesh = init_device_mesh("cpu", mesh_shape)
            theirs = [torch_placement(placement) for placement in placements]
            tensor = distribute_tensor(whole, device_mesh, theirs, src_data_rank=None)
            description = TorchPlatform().describe(tensor, None)
            layout = description.layout
            assert isinstance(tensor, DTensor)
            assert layout == Layout(core_mesh(device_mesh), placements, (7, 5))
            assert description.local_shape == layout.local_shape(rank) == tuple(tensor._local_tensor.shape)
            assert torch.equal(our_local(whole, layout, rank), tensor._local_tensor)


def test_a_slice_keeps_its_root_where_a_mesh_without_one_is_equal_to_torch() -> None:
    with rank_of(0, 2):
        root = Mesh((2, 1), (0, 1), ("dp", "tp"))
        sliced = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["dp"]
        alone = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        assert sliced == alone
        assert [core_mesh(mesh).root for mesh in (sliced, alone, sliced)] == [root, None, root]
        layouts = TorchPlatform().layout
        assert [layouts(m, (Shard(0),), (4,)).mesh.root for m in (sliced, alone)] == [root, None]
        last = [prepare([], None, pp_mesh).plan.last for pp_mesh in (sliced, alone, sliced)]
        assert [part is None for part in last] == [True, False, True]


def test_a_mesh_becomes_a_core_mesh_with_its_root() -> None:
    with rank_of(5, 8):
        device_mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        root = Mesh((2, 2, 2), tuple(range(8)), ("pp", "dp", "tp"))
        assert core_mesh(device_mesh) == root
        assert core_mesh(device_mesh["tp"]) == Mesh((2,), (4, 5), ("tp",), root)
        assert core_mesh(device_mesh["dp"]) == Mesh((2,), (5, 7), ("dp",), root)
        assert core_mesh(device_mesh["pp", "tp"]) == Mesh((2, 2), (0, 1, 4, 5), ("pp", "tp"), root)
        assert root.spanned_dims(core_mesh(device_mesh["pp", "tp"]).ranks) == (0, 2)


def test_a_flattened_mesh_is_a_slice_of_its_root() -> None:
    with rank_of(5, 8):
        device_mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        flat = core_mesh(device_mesh["dp", "tp"]._flatten("both"))
        assert flat.ranks == (4, 5, 6, 7)
        assert flat.root is not None
        assert flat.root.spanned_dims(flat.ranks) == (1, 2)


PAIRS = [
    (Shard(1), "Shard"),
    (StridedShard(1, split_factor=3), "_StridedShard"),
    (Replicate(), "Replicate"),
    *((Partial(op), "Partial") for op in ("sum", "avg", "max", "min")),
]


@pytest.mark.parametrize(("placement", "kind"), PAIRS, ids=str)
def test_placements_go_to_torch_and_back(placement: Placement, kind: str) -> None:
    theirs = torch_placement(placement)
    assert type(theirs).__name__ == kind
    assert type(theirs).__module__.startswith("torch.")
    assert core_placement(theirs) == placement
    assert type(core_placement(theirs)) is type(placement)


def test_a_root_is_found_as_older_versions_of_torch_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.10 a mesh has no method for it, but the module has a registry."""
    with rank_of(1, 4):
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        part = whole["b"]
        expected = core_mesh(part)
        monkeypatch.delattr(DeviceMesh, "_get_root_mesh")
        registry = SimpleNamespace(get_root_mesh=lambda mesh: {id(part): whole, id(whole): whole}[id(mesh)])
        monkeypatch.setattr(device_mesh, "_mesh_resources", registry)
        assert core_mesh(part) == expected == Mesh((2,), (0, 1), ("b",), core_mesh(whole))

"""The table of parity cases: which tensors lie where, in which dtype, and on which ranks a gradient is missing.

A case is data, so that every backend, the oracle and a report read the same. Placements are the core's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.core.placement import Placement, Replicate, Shard, StridedShard

NORM_TYPES = (2.0, 1.0, 3.0, math.inf, 0.0, -math.inf, 0.5)
DTYPES = ("float32", "bfloat16", "float16")
MAX_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter: its global shape, the names of the mesh dims it lies on and a placement for each.

    Without mesh dims it is a plain tensor. ``missing_on`` are the ranks that have no gradient of it.
    """

    shape: tuple[int, ...]
    mesh_dims: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()
    dtype: str = "float32"
    missing_on: frozenset[int] = frozenset()
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a mesh of all ranks. The gradients follow from ``name``, which is unique."""

    name: str
    parallelism: str
    mesh_shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh_shape)


_Mesh = tuple[tuple[int, ...], tuple[str, ...]]
_PATTERNS = (
    "one missing on one rank",
    "one missing everywhere",
    "none on one rank",
    "others missing on each rank",
    "none at all",
)
_FLAT = ("dp",)
_GRID = ("dp", "tp")


def _models(world_size: int) -> Iterator[tuple[str, _Mesh, tuple[Tensor, ...]]]:
    """(parallelism, mesh, tensors) of every parallelism that fits ``world_size``."""
    line: _Mesh = (world_size,), _FLAT
    yield "plain", line, (Tensor((4, 3)), Tensor((5,)), Tensor(()))
    yield "replicated", line, (Tensor((4, 3), _FLAT, (Replicate(),)), Tensor((5,), _FLAT, (Replicate(),)))
    yield "fsdp", line, _sharded(Shard(0))
    yield "fsdp+plain", line, (*_sharded(Shard(0)), Tensor((6,)))
    yield "fsdp on dim 1", line, (Tensor((3, 10), _FLAT, (Shard(1),)), Tensor((2, 1), _FLAT, (Shard(-1),)))
    if world_size % 2 == 0:
        grid: _Mesh = (2, world_size // 2), _GRID
        yield (
            "hsdp",
            grid,
            (
                Tensor((7, 3), _GRID, (Replicate(), Shard(0))),
                Tensor((4,), _GRID, (Replicate(), Shard(0))),
                Tensor((1,), _GRID, (Replicate(), Shard(0))),
            ),
        )
        yield "tp+fsdp", grid, _tensor_parallel(world_size // 2)


def _sharded(placement: Placement) -> tuple[Tensor, ...]:
    """Even, uneven and empty shards (a dimension of 1 leaves all but one rank without elements)."""
    return tuple(Tensor(shape, _FLAT, (placement,)) for shape in ((12, 5), (7, 3), (1, 4), (5,)))


def _tensor_parallel(tp: int) -> tuple[Tensor, ...]:
    """Column- and row-wise weights under FSDP, a norm weight that tp replicates, an unsharded bias."""
    return (
        Tensor((8, 6), _GRID, (StridedShard(0, split_factor=tp), Shard(0))),
        Tensor((6, 8), _GRID, (Shard(0), Shard(1))),
        Tensor((9, 2), _GRID, (Shard(0), Shard(0))),
        Tensor((6,), ("dp",), (Shard(0),)),
        Tensor((5,), _GRID, (Replicate(), Replicate())),
        Tensor((3,)),
    )


def _missing(world_size: int, count: int) -> dict[str, list[frozenset[int]]]:
    """Per pattern, the ranks on which each of ``count`` gradients is missing."""
    last, everywhere, nowhere = frozenset({world_size - 1}), frozenset(range(world_size)), frozenset[int]()
    return {
        "all present": [nowhere] * count,
        "one missing on one rank": [last, *[nowhere] * (count - 1)],
        "one missing everywhere": [everywhere, *[nowhere] * (count - 1)],
        "none on one rank": [last] * count,
        "others missing on each rank": [frozenset({index % world_size}) for index in range(count)],
        "none at all": [everywhere] * count,
    }


def build_cases(world_size: int) -> tuple[Case, ...]:
    """All cases for a job of ``world_size`` ranks: parallelism x dtype, and x missing gradients in float32."""
    cases: list[Case] = []
    for parallelism, mesh, tensors in _models(world_size):
        mixed = [DTYPES[index % len(DTYPES)] for index in range(len(tensors))]
        for label, dtypes in {
            **{dtype: [dtype] * len(tensors) for dtype in DTYPES},
            "mixed dtypes": mixed,
        }.items():
            cases.append(_case(parallelism, label, world_size, mesh, tensors, dtypes, "all present"))
        cases.append(
            _case(parallelism, "tiny", world_size, mesh, tensors, ["float32"] * len(tensors), "all present")
        )
        # Plain tensors alone are not communicated, so a rank then knows its own gradients only.
        patterns = ["one missing everywhere", "none at all"] if parallelism == "plain" else _PATTERNS
        for pattern in patterns:
            cases.append(
                _case(parallelism, pattern, world_size, mesh, tensors, ["float32"] * len(tensors), pattern)
            )
    return tuple(cases)


def _case(
    parallelism: str,
    label: str,
    world_size: int,
    mesh: _Mesh,
    tensors: tuple[Tensor, ...],
    dtypes: list[str],
    pattern: str,
) -> Case:
    missing = _missing(world_size, len(tensors))[pattern]
    scale = 1e-7 if label == "tiny" else 1.0
    described = tuple(
        Tensor(tensor.shape, tensor.mesh_dims, tensor.placements, dtype, absent, scale)
        for tensor, dtype, absent in zip(tensors, dtypes, missing, strict=True)
    )
    return Case(f"{parallelism}, {label}, {world_size} ranks", parallelism, *mesh, described)

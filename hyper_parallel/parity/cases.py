"""The table of parity cases: which tensors lie where, in which dtype, and on which ranks a gradient is missing.

A case is data, so that every backend, the oracle and a report read the same. Placements are the core's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hyper_parallel.core.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard, StridedShard

NORM_TYPES = (2.0, 1.0, 3.0, math.inf, 0.0, -math.inf, 0.5)
DTYPES = ("float32", "bfloat16", "float16")
MAX_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter: its global shape, the names of the mesh dims it lies on and a placement for each.

    Without mesh dims it is a plain tensor. ``missing_on`` are the ranks that have no gradient of it. ``stages`` are
    the pipeline stages that hold it (none: all); if they are several, they share it under ``shared``.
    """

    shape: tuple[int, ...]
    mesh_dims: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()
    dtype: str = "float32"
    missing_on: frozenset[int] = frozenset()
    scale: float = 1.0
    stages: tuple[int, ...] = ()
    shared: str | None = None


@dataclass(frozen=True, slots=True)
class Mesh:
    """An arrangement of all ranks; its dim names are no other mesh's."""

    shape: tuple[int, ...]
    dim_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A model on meshes of all ranks. The gradients follow from ``name``, which is unique.

    ``variant`` is the dtype, or what is special about the gradients. A mesh dim named ``pp`` is that of pipeline
    stages.
    """

    name: str
    parallelism: str
    meshes: tuple[Mesh, ...]
    tensors: tuple[Tensor, ...]
    variant: str = ""

    @property
    def world_size(self) -> int:
        return math.prod(self.meshes[0].shape)

    @property
    def has_stages(self) -> bool:
        return any("pp" in mesh.dim_names for mesh in self.meshes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where a rank stands along every mesh dim."""
        found = {}
        for mesh in self.meshes:
            left = rank
            for name, size in zip(reversed(mesh.dim_names), reversed(mesh.shape), strict=True):
                left, found[name] = divmod(left, size)
        return found

    def sizes(self) -> dict[str, int]:
        """The size of every mesh dim."""
        return {name: n for mesh in self.meshes for name, n in zip(mesh.dim_names, mesh.shape, strict=True)}

    def holds(self, tensor: Tensor, rank: int) -> bool:
        """Whether the parameter is on this rank's pipeline stage."""
        return not tensor.stages or self.coordinate(rank).get("pp", 0) in tensor.stages


_PATTERNS = (
    "one missing on one rank",
    "one missing everywhere",
    "none on one rank",
    "others missing on each rank",
    "none at all",
)
_ALL_OR_NONE = ("plain", "partial+shard", "pipeline", "pipeline+fsdp")
_FLAT = ("dp",)
_GRID = ("dp", "tp")


def _models(world_size: int) -> Iterator[tuple[str, tuple[Mesh, ...], tuple[Tensor, ...]]]:
    """(parallelism, meshes, tensors) of every parallelism that fits ``world_size``."""
    line = (Mesh((world_size,), _FLAT),)
    yield "plain", line, (Tensor((4, 3)), Tensor((5,)), Tensor(()))
    yield "replicated", line, (Tensor((4, 3), _FLAT, (Replicate(),)), Tensor((5,), _FLAT, (Replicate(),)))
    yield "fsdp", line, _sharded(Shard(0))
    yield "fsdp+plain", line, (*_sharded(Shard(0)), Tensor((6,)))
    yield "fsdp on dim 1", line, (Tensor((3, 10), _FLAT, (Shard(1),)), Tensor((2, 1), _FLAT, (Shard(-1),)))
    yield "partial", line, tuple(Tensor((5, 3), _FLAT, (Partial(reduce_op),)) for reduce_op in REDUCE_OPS)
    yield "partial+fsdp", line, (*_sharded(Shard(0)), Tensor((4,), _FLAT, (Partial(),)), Tensor((2, 2)))
    if world_size > 1:
        yield "pipeline", (Mesh((world_size,), ("pp",)),), _pipeline(world_size, (), ())
    if world_size % 2 == 0:
        yield from _two_dimensional(world_size // 2)
        yield from _several_meshes(world_size // 2)


def _two_dimensional(half: int) -> Iterator[tuple[str, tuple[Mesh, ...], tuple[Tensor, ...]]]:
    grid = (Mesh((2, half), _GRID),)
    shapes = ((7, 3), (4,), (1,))
    yield "hsdp", grid, tuple(Tensor(shape, _GRID, (Replicate(), Shard(0))) for shape in shapes)
    yield "tp+fsdp", grid, _tensor_parallel(half)
    yield (
        "partial+shard",
        grid,
        (
            Tensor((7, 3), _GRID, (Partial(), Shard(0))),
            Tensor((5, 2), _GRID, (Shard(1), Partial("avg"))),
            Tensor((3,), _GRID, (Partial("max"), Partial("max"))),
            Tensor((4,), ("tp",), (Partial(),)),
            Tensor((6,), _GRID, (Replicate(), Partial("min"))),
        ),
    )
    staged = (Mesh((2, half), ("pp", "dp")),)
    yield "pipeline+fsdp", staged, _pipeline(2, ("dp",), (Shard(0),))


def _several_meshes(half: int) -> Iterator[tuple[str, tuple[Mesh, ...], tuple[Tensor, ...]]]:
    yield (
        "experts",
        (
            Mesh((2 * half,), ("fsdp",)),
            Mesh((half, 2), ("expert_dp", "ep")),
            Mesh((2, half), ("rows", "columns")),
        ),
        (
            Tensor((9, 2), ("fsdp",), (Shard(0),)),
            Tensor((4, 3, 2), ("expert_dp", "ep"), (Shard(1), Shard(0))),
            Tensor((4, 3), ("ep",), (Shard(0),)),
            Tensor((7, 5), ("rows", "columns"), (Shard(0), Shard(1))),
            Tensor((3,), ("fsdp",), (Replicate(),)),
            Tensor((2,)),
        ),
    )
    # With 8 ranks all three dims are larger than 1.
    cp = 2 if half % 2 == 0 and half > 2 else 1
    cube = (Mesh((half // cp, cp, 2), ("dp", "cp", "tp")),)
    yield (
        "3-d mesh",
        cube,
        (
            Tensor((8, 5), ("dp", "cp", "tp"), (Shard(0), Shard(0), Shard(1))),
            Tensor((9, 3), ("dp", "cp", "tp"), (StridedShard(0, split_factor=2), Replicate(), Shard(0))),
            Tensor((5,), ("dp", "cp"), (Shard(0), Replicate())),
            Tensor((2, 4), ("tp",), (Shard(1),)),
        ),
    )


def _pipeline(
    stages: int, mesh_dims: tuple[str, ...], placements: tuple[Placement, ...]
) -> tuple[Tensor, ...]:
    """A tied embedding on the first and the last stage, a layer on each but the second, more of them on the first."""
    layers = [Tensor((4 + s, 3), mesh_dims, placements, stages=(s,)) for s in range(stages) if s != 1]
    tied = Tensor((5, 2), mesh_dims, placements, stages=(0, stages - 1), shared="embedding")
    head = Tensor((3,), stages=(0,))
    return (tied, *layers, head)


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


def _missing(ranks: list[list[int]]) -> dict[str, list[frozenset[int]]]:
    """Per pattern, the ranks on which each gradient is missing, of tensors that ``ranks`` hold."""
    nowhere = frozenset[int]()
    first, *rest = ranks
    last = max(max(held) for held in ranks)
    return {
        "all present": [nowhere for _ in ranks],
        "one missing on one rank": [frozenset({first[-1]}), *(nowhere for _ in rest)],
        "one missing everywhere": [frozenset(first), *(nowhere for _ in rest)],
        "none on one rank": [frozenset({last}) & frozenset(held) for held in ranks],
        "others missing on each rank": [frozenset({held[i % len(held)]}) for i, held in enumerate(ranks)],
        "none at all": [frozenset(held) for held in ranks],
    }


def build_cases(world_size: int) -> tuple[Case, ...]:
    """All cases for a job of ``world_size`` ranks: parallelism x dtype, and x missing gradients in float32."""
    cases: list[Case] = []
    for parallelism, meshes, tensors in _models(world_size):
        model = Case("", parallelism, meshes, tensors)
        mixed = tuple(DTYPES[index % len(DTYPES)] for index in range(len(tensors)))
        dtypes = {dtype: (dtype,) * len(tensors) for dtype in DTYPES} | {"mixed dtypes": mixed}
        cases.extend(_variant(model, label, "all present", each) for label, each in dtypes.items())
        cases.append(_variant(model, "tiny", "all present", dtypes["float32"]))
        cases.extend(
            _variant(model, pattern, pattern, dtypes["float32"]) for pattern in _patterns(parallelism)
        )
    return tuple(cases)


def selected_cases(world_sizes: Sequence[int], words: Sequence[str]) -> tuple[Case, ...]:
    """The cases of these sizes whose names have all ``words``."""
    cases = (case for world_size in world_sizes for case in build_cases(world_size))
    return tuple(case for case in cases if all(word in case.name for word in words))


def _patterns(parallelism: str) -> tuple[str, ...]:
    # Plain tensors alone are not communicated, so a rank then knows its own gradients only. Of copies that are
    # Partial, and of shared ones, a gradient is expected on all or none.
    return _PATTERNS if parallelism not in _ALL_OR_NONE else ("one missing everywhere", "none at all")


def _variant(model: Case, label: str, pattern: str, dtypes: tuple[str, ...]) -> Case:
    held = [
        [rank for rank in range(model.world_size) if model.holds(tensor, rank)] for tensor in model.tensors
    ]
    tensors = tuple(
        replace(tensor, dtype=dtype, missing_on=missing, scale=1e-7 if label == "tiny" else 1.0)
        for tensor, dtype, missing in zip(model.tensors, dtypes, _missing(held)[pattern], strict=True)
    )
    name = f"{model.parallelism}, {label}, {model.world_size} ranks"
    return replace(model, name=name, tensors=tensors, variant=label)

"""A layout: which area of a global tensor each rank holds, known from metadata alone.

Sharding follows PyTorch's DTensor: chunks of ``ceil(size / n)``, placements applied from left to right.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import TypeAlias

from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard, StridedShard

Interval: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Area:
    """A block of a global tensor: it starts at ``offsets`` and extends over ``sizes``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """One tensor of ``global_shape`` on ``mesh``, with one placement per mesh dimension.

    Negative dims are stored as positive ones, so that equal layouts compare equal.

    Raises:
        ValueError: the placements are not as many as the mesh's dims, or one names a dim the tensor lacks.
        TypeError: something that is no placement stands among them.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    global_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != self.mesh.ndim:
            raise ValueError(
                f"{len(self.placements)} placements {self.placements} "
                f"for a mesh of {self.mesh.ndim} dimensions"
            )
        object.__setattr__(self, "placements", tuple(self._normalised(p) for p in self.placements))

    def _normalised(self, placement: Placement) -> Placement:
        if isinstance(placement, Shard | StridedShard):
            ndim = len(self.global_shape)
            if not -ndim <= placement.dim < ndim:
                raise ValueError(f"{placement} names a dim that a tensor of shape {self.global_shape} lacks")
            return replace(placement, dim=placement.dim % ndim)
        if not isinstance(placement, Replicate | Partial):
            raise TypeError(f"expected Shard, StridedShard, Replicate or Partial, got {placement!r}")
        return placement

    @property
    def shard_dims(self) -> tuple[int, ...]:
        """The mesh dims along which ranks hold different areas."""
        return tuple(d for d, p in enumerate(self.placements) if isinstance(p, Shard | StridedShard))

    @property
    def partial_dims(self) -> tuple[int, ...]:
        """The mesh dims along which the values are still to be reduced."""
        return tuple(d for d, p in enumerate(self.placements) if isinstance(p, Partial))

    @property
    def num_chunks(self) -> int:
        """How many different areas there are (empty ones included)."""
        return prod(self.mesh.shape[d] for d in self.shard_dims)

    def chunk(self, rank: int) -> int:
        """The number, below ``num_chunks``, of the area that ``rank`` holds; equal numbers are copies."""
        here = self._coordinate(rank)
        index = 0
        for d in self.shard_dims:
            index = index * self.mesh.shape[d] + here[d]
        return index

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the local tensor of ``rank``."""
        return tuple(
            sum(stop - start for start, stop in dim) for dim in _intervals(self, self._coordinate(rank))
        )

    def areas(self, rank: int) -> tuple[Area, ...]:
        """The blocks that ``rank`` holds, in the order they take in its local tensor; none if it holds nothing."""
        blocks = product(*_intervals(self, self._coordinate(rank)))
        return tuple(
            Area(tuple(start for start, _ in block), tuple(stop - start for start, stop in block))
            for block in blocks
        )

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        here = self.mesh.coordinate(rank)
        if here is None:
            raise ValueError(f"rank {rank} is not in the mesh of ranks {self.mesh.ranks}")
        return here


@lru_cache(maxsize=65536)
def _intervals(layout: Layout, coordinate: tuple[int, ...]) -> tuple[tuple[Interval, ...], ...]:
    """Per tensor dim, the runs of global indices held at ``coordinate``."""
    held: list[tuple[Interval, ...]] = [((0, size),) if size else () for size in layout.global_shape]
    for mesh_dim in layout.shard_dims:
        placement = layout.placements[mesh_dim]
        assert isinstance(placement, Shard | StridedShard)
        pieces = placement.split_factor if isinstance(placement, StridedShard) else 1
        number, index = layout.mesh.shape[mesh_dim], coordinate[mesh_dim]
        held[placement.dim] = _merged(
            run
            for piece in range(pieces)
            for run in _chunk(_chunk(held[placement.dim], pieces, piece), number, index)
        )
    return tuple(held)


def _chunk(runs: tuple[Interval, ...], number: int, index: int) -> tuple[Interval, ...]:
    """Chunk ``index`` of ``number`` of the indices in ``runs``, cut as ``ceil(total / number)``."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // number)
    return _window(runs, min(index * size, total), min((index + 1) * size, total))


def _window(runs: tuple[Interval, ...], first: int, last: int) -> tuple[Interval, ...]:
    """The part of ``runs`` between positions ``first`` and ``last``, counted through the runs."""
    cut, before = [], 0
    for start, stop in runs:
        low, high = max(first - before, 0), min(last - before, stop - start)
        if low < high:
            cut.append((start + low, start + high))
        before += stop - start
    return tuple(cut)


def _merged(runs: Iterable[Interval]) -> tuple[Interval, ...]:
    merged: list[Interval] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return tuple(merged)

"""Placements: how one tensor lies along one mesh dimension (the terms of PyTorch's DTensor)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

REDUCE_OPS = ("sum", "avg", "max", "min")


@dataclass(frozen=True, slots=True)
class Shard:
    """Tensor dimension ``dim`` is cut into chunks of ``ceil(size / n)``; a negative ``dim`` counts from the end.

    Trailing ranks may hold a short or an empty chunk.
    """

    dim: int = 0


@dataclass(frozen=True, slots=True)
class StridedShard:
    """Like ``Shard``, of a dimension that a later mesh dimension has already cut into ``split_factor`` chunks.

    Each of these chunks is cut in its turn, and a rank holds its piece of every one. This is FSDP over
    tensor parallelism on one dimension: 8 rows on ``(dp=2, tp=2)`` with ``StridedShard(0, split_factor=2),
    Shard(0)`` put rows 0-1 on rank 0, 4-5 on rank 1, 2-3 on rank 2 and 6-7 on rank 3.
    """

    dim: int = 0
    _: KW_ONLY
    split_factor: int = 1

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise ValueError(f"StridedShard: split_factor must be at least 1, got {self.split_factor}")


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the mesh dimension holds the same values."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank along the mesh dimension holds one term; ``reduce_op`` over them gives the values.

    Raises:
        ValueError: ``reduce_op`` is none of ``sum``, ``avg``, ``max`` and ``min``.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise ValueError(f"Partial: unknown reduce_op {self.reduce_op!r}, expected one of {REDUCE_OPS}")


Placement: TypeAlias = Shard | StridedShard | Replicate | Partial

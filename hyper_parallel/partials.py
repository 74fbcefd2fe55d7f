"""Partial gradients: their values are reduced before the norm is taken, in buckets of bounded size.

One reduce-scatter per bucket and mesh dim leaves each rank with its own slice of the reduced values. A gradient
that is missing on a rank takes part with the identity of the reduce op; ``avg`` is SUM and a division everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hyper_parallel.core.norm import NormKind
from hyper_parallel.core.plan import Reduction
from hyper_parallel.interface import Buffer, Platform, Scalar, Tensor

BUCKET_NUMEL = 4 * 2**20
"""Elements of a bucket; with its copies in flight a call stays under 64 MB."""

_IDENTITY = {"sum": 0.0, "avg": 0.0, "max": -math.inf, "min": math.inf}


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of the local tensor of ``member`` (a position in the reduction)."""

    member: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Reduced:
    """Statistics of this rank's slices, and which tensors have a gradient on any of the ranks."""

    statistics: tuple[Scalar, ...]
    present: tuple[bool, ...]


def reduce_partials(
    platform: Platform,
    kind: NormKind,
    reduction: Reduction,
    gradients: Sequence[Tensor | None],
    anchor: Tensor | None,
) -> Reduced:
    """Reduce gradients (in the order of the reduction, None: missing) and take the statistics of this rank's slices.

    Collectives: one all-reduce of a flag per tensor over each mesh dim of the chain, and per bucket and mesh dim
    one reduce-scatter.
    """
    reached, nan = _flags(platform, reduction, gradients, anchor)
    statistics = [
        statistic
        for bucket in buckets(reduction.numels, BUCKET_NUMEL)
        if (statistic := _bucket_statistic(platform, kind, reduction, gradients, bucket, reached, anchor))
        is not None
    ]
    if nan and kind.p != 0:  # a NaN is not zero
        statistics.append(platform.pack([math.nan], anchor)[0])
    return Reduced(tuple(statistics), reached[-1])


def combine(platform: Platform, kind: NormKind, a: Scalar, b: Scalar) -> Scalar:
    """One of two statistics that have the sign they travel with; NaN survives."""
    if kind.reduce_op == "sum":
        return a + b
    return platform.where(a > b, a, platform.where(b >= a, b, a + b))  # neither holds if one is NaN


def _flags(
    platform: Platform, reduction: Reduction, gradients: Sequence[Tensor | None], anchor: Tensor | None
) -> tuple[tuple[tuple[bool, ...], ...], bool]:
    """After each step of the chain, which tensors have a gradient anywhere; and whether MAX or MIN would drop a NaN."""
    there = [gradient for gradient in gradients if gradient is not None]
    nan: Scalar | float = 0.0
    if there and any(reduce_op in ("max", "min") for _, reduce_op in reduction.chain):
        largest = platform.statistic(there, NormKind(math.inf), None)
        nan = largest != largest
    buffer = platform.pack([*(float(gradient is not None) for gradient in gradients), nan], anchor)
    flags = []
    for ranks, _ in reduction.chain:
        buffer = platform.all_reduce(buffer, "max", tuple(sorted(ranks)))
        flags.append(platform.read(buffer, True) or [0.0])  # at once: the next reduction may be in place
    return tuple(tuple(flag > 0 for flag in step[:-1]) for step in flags), flags[-1][-1] > 0


def _bucket_statistic(
    platform: Platform,
    kind: NormKind,
    reduction: Reduction,
    gradients: Sequence[Tensor | None],
    bucket: Sequence[Piece],
    reached: Sequence[Sequence[bool]],
    anchor: Tensor | None,
) -> Scalar | None:
    ways = prod(len(ranks) for ranks, _ in reduction.chain)
    length = sum(piece.stop - piece.start for piece in bucket)
    pieces = [(gradients[piece.member], piece.start, piece.stop) for piece in bucket]
    padded = -(-length // ways) * ways
    buffer = platform.flatten(pieces, padded, _IDENTITY[reduction.chain[0][1]], anchor)
    buffer, offset = _scattered(platform, reduction, buffer, padded, bucket, reached, anchor)
    held = [
        buffer[low - offset : high - offset]
        for piece, low, high in _overlap(bucket, offset, offset + padded // ways)
        if reached[-1][piece.member]
    ]
    return platform.statistic(held, kind, None) if held else None


def _scattered(
    platform: Platform,
    reduction: Reduction,
    buffer: Buffer,
    numel: int,
    bucket: Sequence[Piece],
    reached: Sequence[Sequence[bool]],
    anchor: Tensor | None,
) -> tuple[Buffer, int]:
    """This rank's slice of the reduced buffer, and where it starts.

    Slices are numbered by position in the mesh, so that they fit those of the sister lines in the next step; a
    group hands them out by rank.
    """
    rank, offset = platform.rank(), 0
    for step, (ranks, reduce_op) in enumerate(reduction.chain):
        if step:
            absent = [
                (low - offset, high - offset)
                for piece, low, high in _overlap(bucket, offset, offset + numel)
                if not reached[step - 1][piece.member]
            ]
            buffer = _refilled(platform, buffer, numel, absent, _IDENTITY[reduce_op], anchor)
        group, size = tuple(sorted(ranks)), numel // len(ranks)
        if group != ranks:
            starts = [ranks.index(member) * size for member in group]
            buffer = platform.flatten([(buffer, start, start + size) for start in starts], numel, 0.0, anchor)
        buffer = platform.reduce_scatter(buffer, "sum" if reduce_op == "avg" else reduce_op, group)
        if reduce_op == "avg":
            buffer = buffer / len(ranks)
        numel = size
        offset += numel * ranks.index(rank)
    return buffer, offset


def _refilled(
    platform: Platform,
    buffer: Buffer,
    numel: int,
    absent: Sequence[tuple[int, int]],
    fill: float,
    anchor: Tensor | None,
) -> Buffer:
    """Where all terms of a step are missing, its result is the identity of the next step's op, not of its own."""
    if not absent:
        return buffer
    pieces: list[tuple[Tensor | None, int, int]] = []
    position = 0
    for low, high in absent:
        pieces += [(buffer, position, low), (None, low, high)]
        position = high
    return platform.flatten([*pieces, (buffer, position, numel)], numel, fill, anchor)


def _overlap(bucket: Sequence[Piece], first: int, last: int) -> Iterator[tuple[Piece, int, int]]:
    """The pieces that lie between two positions in the bucket, with the positions they take there."""
    position = 0
    for piece in bucket:
        end = position + piece.stop - piece.start
        if max(position, first) < min(end, last):
            yield piece, max(position, first), min(end, last)
        position = end


@lru_cache(maxsize=256)
def buckets(numels: tuple[int, ...], bucket_numel: int) -> tuple[tuple[Piece, ...], ...]:
    """Fill buckets in order, cutting tensors where one is full."""
    filled: list[list[Piece]] = []
    room = 0
    for member, numel in enumerate(numels):
        start = 0
        while start < numel:
            if not room:
                filled.append([])
                room = bucket_numel
            stop = min(numel, start + room)
            filled[-1].append(Piece(member, start, stop))
            room -= stop - start
            start = stop
    return tuple(map(tuple, filled))

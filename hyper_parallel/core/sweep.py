"""Boxes that are to tile a cell: whether they do, and where they do not.

They are nearly always a grid, which the intervals of each dim tell.

Whether others do needs no comparison of boxes. Take the function that counts, for each element, the boxes that hold it,
and its differences along all dims: they are zero but at the corners of boxes, 2**d each, where they are 1 or -1 by
turns, and sums give the function back. So it is that of the cell, 1 inside and 0 elsewhere, if and only if the corners
of the boxes add up to those of the cell. That takes O(n) in d dims, of which those that no box cuts drop out.

Corners that do not add up enclose all that is wrong. This part is swept for overlaps and holes: space is cut wherever
no box is cut and, which keeps the depth at O(d log n), at the median edge, until each box spans its cell in all dims
but one. Such slabs are sorted and swept along that dim: O(n log(n)**2) while a cut meets few boxes, about n**2 if many
cross everywhere (rods, random overlaps).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain, permutations
from math import prod
from operator import add, ne
from typing import TypeAlias

from hyper_parallel.core.layout import Interval

Shape: TypeAlias = tuple[int, ...]
Spans: TypeAlias = tuple[Interval, ...]
Box: TypeAlias = tuple[Spans, int]
Column: TypeAlias = Sequence[int]
Corners: TypeAlias = tuple[list[Column], list[Column]]
"""Columns of corners that count 1, and of those that count -1."""


def is_grid(shape: Shape, starts: Sequence[Column], sizes: Sequence[Column], number: int) -> bool:
    """Whether ``number`` distinct boxes are all products of intervals that tile their dims, and so tile ``shape``.

    No size may be below zero.
    """
    tiles = 1
    for end, column in zip(shape, zip(starts, sizes, strict=True), strict=True):
        intervals = sorted(set(zip(*column, strict=True)))
        if [*(start for start, _ in intervals), end] != [0, *(start + size for start, size in intervals)]:
            return False
        tiles *= len(intervals)
    return tiles == number


def faulty_cell(shape: Shape, edges: Sequence[tuple[Column, Column]], number: int) -> Spans | None:
    """The smallest cell with every element that is not in exactly one box; None if there is no such element.

    Args:
        shape: all that is to be tiled.
        edges: of each dim where the boxes start and where they stop, which is neither before nor outside of ``shape``.
        number: how many boxes there are.
    """
    # A corner is one number, which unlike a tuple costs little to hash: its place in an array of shape + 1.
    boxes: Corners = ([[0] * number], [])
    whole: Corners = ([[0]], [])
    strides, stride = [], 1
    for size, (starts, stops) in zip(shape, edges, strict=True):
        cut = not number or starts.count(0) + stops.count(size) < 2 * number
        strides.append(stride if cut else 0)
        if cut:
            boxes = _extended(boxes, [at * stride for at in starts], [at * stride for at in stops])
            whole = _extended(whole, [0], [size * stride])
            stride *= size + 1
    plus, minus = (Counter(chain(*ours, *theirs)) for ours, theirs in zip(boxes, whole[::-1], strict=True))
    if dict.__eq__(plus, minus):  # Counter's own does not run in C
        return None
    odd = {corner for corner, _ in plus.items() ^ minus.items()}
    cell = []
    for size, stride in zip(shape, strides, strict=True):
        places = [corner // stride % (size + 1) for corner in odd] if stride else [0, size]
        cell.append((min(places), max(places)))
    return tuple(cell)


def _extended(corners: Corners, low: Column, high: Column) -> Corners:
    """Corners in one more dim, in which the boxes extend from ``low`` to ``high``."""

    def moved(columns: list[Column], by: Column) -> list[Column]:
        return [list(map(add, column, by)) for column in columns]

    plus, minus = corners
    return moved(plus, low) + moved(minus, high), moved(minus, low) + moved(plus, high)


def sweep(shape: Shape, boxes: Sequence[Box], met: dict[int, int]) -> tuple[int, Spans | None]:
    """How many elements of ``shape`` are in no box, and where some are; ``met`` gives each box that meets others one of these."""
    spans = [spans for spans, _ in boxes]
    edges = [([s[d][0] for s in spans], [s[d][1] for s in spans]) for d in range(len(shape))]
    cell = faulty_cell(shape, edges, len(boxes))
    return (0, None) if cell is None else _sweep(cell, _within(cell, boxes), met)


def _within(cell: Spans, boxes: Sequence[Box]) -> list[Box]:
    """The parts of boxes inside of ``cell``."""
    parts = [
        (
            tuple([(max(a, low), min(b, high)) for (a, b), (low, high) in zip(spans, cell, strict=True)]),
            number,
        )
        for spans, number in boxes
    ]
    return [(spans, number) for spans, number in parts if all(start < stop for start, stop in spans)]


def _sweep(cell: Spans, boxes: Sequence[Box], met: dict[int, int]) -> tuple[int, Spans | None]:
    loose = [sum(map(ne, spans, cell)) for spans, _ in boxes]
    if 0 in loose:
        full = boxes[loose.index(0)][1]
        for number in (number for _, number in boxes if number != full):
            met[full], met[number] = number, full
        return 0, None
    crossing = [spans for (spans, _), dims in zip(boxes, loose, strict=True) if dims > 1]
    if not crossing:
        return _sweep_slabs(cell, boxes, met)
    ways = []
    for dim, ends in enumerate(cell):
        edges = sorted(edge for spans in crossing for edge in spans[dim] if edge not in ends)
        ordered = sorted(spans[dim] for spans, _ in boxes)
        reach = accumulate((stop for _, stop in ordered), max)
        free = {start for (start, _), far in zip(ordered[1:], reach, strict=False) if start >= far}
        ways.append((len(free), len(edges), dim, sorted({*free, *edges[len(edges) // 2 :][:1]})))
    *_, dim, cuts = max(ways)
    starts, stops = [cell[dim][0], *cuts], [*cuts, cell[dim][1]]
    inside: list[list[Box]] = [[] for _ in starts]
    for spans, number in boxes:
        start, stop = spans[dim]
        for part in range(bisect_right(stops, start), bisect_left(starts, stop)):
            span = max(start, starts[part]), min(stop, stops[part])
            inside[part].append(((*spans[:dim], span, *spans[dim + 1 :]), number))
    missing, hole = 0, None
    for start, stop, some in zip(starts, stops, inside, strict=True):
        more, where = _sweep((*cell[:dim], (start, stop), *cell[dim + 1 :]), some, met)
        missing, hole = missing + more, hole or where
    return missing, hole


def _sweep_slabs(cell: Spans, boxes: Sequence[Box], met: dict[int, int]) -> tuple[int, Spans | None]:
    """``_sweep`` for boxes that are loose in one dim, where each meets the one that reaches farthest before it."""
    gaps: list[list[Interval]] = []
    slabs: list[list[int]] = []
    for dim, (position, end) in enumerate(cell):
        parallel = sorted((spans[dim], number) for spans, number in boxes if spans[dim] != cell[dim])
        far, free = -1, []
        for (start, stop), number in parallel:
            if start < position:
                met[far], met[number] = number, far
            elif start > position:
                free.append((position, start))
            if stop > position:
                position, far = stop, number
        gaps.append(free + [(position, end)] * (position < end))
        slabs.append([number for _, number in parallel])
    for one, other in permutations(filter(None, slabs), 2):
        met.update(dict.fromkeys(other, one[0]))
    missing = prod(sum(stop - start for start, stop in free) for free in gaps)
    return missing, tuple(free[0] for free in gaps) if missing else None

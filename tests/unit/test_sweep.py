"""Boxes that tile a cell or do not, against an array in which each of them is counted."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.sweep import Box, Shape, faulty_cell, is_grid, sweep

bounded = settings(max_examples=500, deadline=None, derandomize=True)


@st.composite
def scattered(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """Boxes in a cell, among them grids with something added and taken away, so that most elements are held once."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    cuts = [draw(st.sets(st.integers(0, size))) | {0, size} for size in shape]
    points = [sorted(places) for places in cuts]
    spans: list[tuple[tuple[int, int], ...]] = [()]
    for places in points:
        intervals = list(pairwise(places))
        spans = [(*box, interval) for box in spans for interval in intervals]
    spans = [box for box in spans if not draw(st.booleans()) or draw(st.integers(0, 3))]
    edge = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted).map(tuple) for size in shape]
    spans += [box for box in draw(st.lists(st.tuples(*edge), max_size=2)) if all(a < b for a, b in box)]
    return shape, [(box, number) for number, box in enumerate(draw(st.permutations(spans)))]


def counted(shape: Shape, boxes: list[Box]) -> np.ndarray:
    counts = np.zeros(shape, int)
    for spans, _ in boxes:
        counts[tuple(slice(start, stop) for start, stop in spans)] += 1
    return counts


@bounded
@given(scattered())
def test_the_faulty_cell_is_the_smallest_with_all_that_is_not_held_once(
    case: tuple[Shape, list[Box]],
) -> None:
    shape, boxes = case
    wrong = np.argwhere(counted(shape, boxes) != 1)
    edges = [([b[d][0] for b, _ in boxes], [b[d][1] for b, _ in boxes]) for d in range(len(shape))]
    expected = None
    if len(wrong):
        expected = tuple(
            (int(low), int(high) + 1) for low, high in zip(wrong.min(0), wrong.max(0), strict=True)
        )
    assert faulty_cell(shape, edges, len(boxes)) == expected


@bounded
@given(scattered())
def test_the_sweep_finds_what_is_missing_and_a_neighbour_for_each_box_that_meets_one(
    case: tuple[Shape, list[Box]],
) -> None:
    shape, boxes = case
    counts, met = counted(shape, boxes), dict[int, int]()
    missing, hole = sweep(shape, boxes, met)
    assert missing == (counts == 0).sum()
    assert (hole is not None) == (missing > 0)
    if hole is not None:
        assert not counts[tuple(slice(start, stop) for start, stop in hole)].any()
    meeting = {n for n, (s, _) in enumerate(boxes) if (counts[tuple(slice(*span) for span in s)] > 1).any()}
    assert set(met) == meeting
    for one, other in met.items():
        assert one != other
        assert (counted(shape, [boxes[one], boxes[other]]) == 2).any()


@bounded
@given(scattered())
def test_distinct_boxes_that_are_a_grid_tile_the_cell(case: tuple[Shape, list[Box]]) -> None:
    shape, boxes = case
    distinct = list(dict.fromkeys(spans for spans, _ in boxes))
    starts = [[box[d][0] for box in distinct] for d in range(len(shape))]
    sizes = [[box[d][1] - box[d][0] for box in distinct] for d in range(len(shape))]
    exact = bool((counted(shape, [(box, 0) for box in distinct]) == 1).all())
    intervals = [set(zip(a, b, strict=True)) for a, b in zip(starts, sizes, strict=True)]
    product = int(np.prod([len(each) for each in intervals]))
    assert is_grid(shape, starts, sizes, len(distinct)) == (exact and product == len(distinct))

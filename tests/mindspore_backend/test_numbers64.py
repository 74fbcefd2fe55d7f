"""Float64 numbers as integers: sums and maxima over simulated ranks, against exact arithmetic."""

from __future__ import annotations

import itertools
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest

from hyper_parallel_mindspore.numbers64 import MAX_ADDENDS, Numbers, as_numbers, decode, encode

SMALLEST, LARGEST = 5e-324, np.finfo(np.float64).max
VALUES = [
    0.0,
    -0.0,
    1.0,
    2.0**24,
    2.0**53 - 1,
    1 / 3,
    1e40,
    1e-50,
    1e300,
    1e-300,
    2.0**-1022,
    SMALLEST,
    LARGEST,
]


def over_ranks(rows: list[list[float]], reduce_op: str) -> list[float]:
    """What an all-reduce over as many ranks as rows gives."""
    encoded = np.stack([encode(as_numbers(row), reduce_op) for row in rows])
    assert encoded.dtype == np.int64
    return decode(encoded.sum(axis=0) if reduce_op == "sum" else encoded.max(axis=0), reduce_op).tolist()


@pytest.mark.parametrize("reduce_op", ["sum", "max"])
def test_one_rank_gets_its_numbers_back(reduce_op: str) -> None:
    for sign in (1, -1):
        row = [sign * value for value in (*VALUES, math.inf)]
        assert over_ranks([row], reduce_op) == row


@pytest.mark.parametrize("num_ranks", [2, 3, 7, 100])
def test_a_sum_is_that_of_exact_arithmetic(num_ranks: int) -> None:
    generator = np.random.default_rng(num_ranks)
    rows = generator.random((num_ranks, 50)) * 10.0 ** generator.integers(-300, 300, (num_ranks, 50))
    found = over_ranks(rows.tolist(), "sum")
    for column, total in enumerate(found):
        exact = sum(map(Fraction, rows[:, column].tolist()))
        assert abs(Fraction(total) - exact) <= exact * Fraction(4, 2**53)


def test_the_order_of_ranks_does_not_matter() -> None:
    rows = [[1e16, 1e-8], [1.0, 3e20], [-1e16, 7.0], [3.5, 1e-300]]
    found = {tuple(over_ranks(list(order), "sum")) for order in itertools.permutations(rows)}
    assert len(found) == 1
    assert next(iter(found))[0] == 4.5


@pytest.mark.parametrize("number", [0, 1, 5, 2**24 - 1, 2**24, 2**24 + 1, 2**40 + 1])
def test_counts_are_exact(number: int) -> None:
    for num_ranks in (1, 3, 64):
        assert over_ranks([[float(number)]] * num_ranks, "sum") == [float(number * num_ranks)]


def test_as_many_ranks_as_are_promised_do_not_overflow() -> None:
    largest = encode(as_numbers([2.0**53 - 1, 1 / 3, LARGEST / 4096]), "sum")
    assert (largest.astype(object) * MAX_ADDENDS < 2**63).all()
    found = decode(largest * MAX_ADDENDS, "sum").tolist()
    np.testing.assert_allclose(
        found, [(2.0**53 - 1) * MAX_ADDENDS, MAX_ADDENDS / 3, LARGEST / 4096 * MAX_ADDENDS], 1e-15
    )


@pytest.mark.parametrize(
    ("addends", "total"),
    [
        ([math.nan, 1.0], math.nan),
        ([1.0, -math.nan], math.nan),
        ([math.inf, 1.0], math.inf),
        ([math.inf, math.inf], math.inf),
        ([-math.inf, 5.0], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.inf, math.nan], math.nan),
        ([LARGEST, LARGEST], math.inf),
        ([-LARGEST, -LARGEST], -math.inf),
        ([SMALLEST, SMALLEST], 2 * SMALLEST),
        ([1.0, -1.0], 0.0),
    ],
)
def test_sums_beyond_the_ordinary(addends: list[float], total: float) -> None:
    np.testing.assert_array_equal(over_ranks([[a] for a in addends], "sum"), [total])


def test_the_largest_is_found_exactly_among_all_pairs() -> None:
    values = [*VALUES, *(-value for value in VALUES), math.inf, -math.inf]
    for a, b in itertools.product(values, values):
        assert over_ranks([[a], [b]], "max") == [max(a, b)]


def test_nan_is_larger_than_everything() -> None:
    for nan, other in itertools.product((math.nan, -math.nan), (math.inf, -math.inf, 0.0)):
        assert math.isnan(over_ranks([[other], [nan]], "max")[0])
        assert math.isnan(over_ranks([[nan], [other]], "max")[0])


def test_numbers_calculate_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero, inf, buffer = as_numbers(0.0), as_numbers(math.inf), as_numbers([4.0, 1e300, math.nan])
        assert zero**-1 == math.inf
        assert zero**-0.5 == math.inf
        assert buffer[1] ** 2 == math.inf
        assert math.isnan(zero * inf)
        assert math.isnan(inf - inf)
        assert math.isnan(inf // 1)
        assert 1.0 / zero == math.inf
        assert buffer[0] ** 0.5 == 2.0
        assert (buffer[0] + 0.5) // 1 == 4.0


def test_what_comes_of_numbers_are_numbers() -> None:
    buffer = as_numbers([4.0, 9.0])
    for value in (
        buffer[0],
        buffer[0] + 1,
        1 - buffer[0],
        buffer[0] * buffer[1],
        buffer[0] > 3,
        -buffer[0],
        buffer[:1],
    ):
        assert isinstance(value, Numbers)
    assert bool(buffer[0] < buffer[1])
    assert float(buffer[1]) == 9.0

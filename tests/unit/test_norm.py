"""Norm kinds."""

from __future__ import annotations

import math

import pytest

from hyper_parallel.core.norm import NormKind


@pytest.mark.parametrize(
    ("p", "reduce_op", "identity", "sign"),
    [
        (2, "sum", 0.0, 1),
        (0.5, "sum", 0.0, 1),
        (-1, "sum", 0.0, 1),
        (0, "sum", 0.0, 1),
        (math.inf, "max", 0.0, 1),
        (-math.inf, "max", math.inf, -1),
        ("inf", "max", 0.0, 1),
    ],
)
def test_how_statistics_combine(p: float, reduce_op: str, identity: float, sign: int) -> None:
    kind = NormKind(p)
    assert (kind.reduce_op, kind.identity, kind.sign) == (reduce_op, identity, sign)


@pytest.mark.parametrize(
    ("p", "statistic", "norm"),
    [(2, 25.0, 5.0), (1, 7.0, 7.0), (3, 27.0, 3.0), (0.5, 3.0, 9.0), (-1, 4.0, 0.25), (math.inf, 3.0, 3.0)],
)
def test_root(p: float, statistic: float, norm: float) -> None:
    assert NormKind(p).root(statistic) == pytest.approx(norm)


@pytest.mark.parametrize("count", [0.0, 5.0, 4.999999999, 5.000000001, 2.0**40])
def test_root_of_a_count_is_the_nearest_integer(count: float) -> None:
    assert NormKind(0).root(count) == round(count)


def test_p_is_stored_as_a_float_so_that_equal_kinds_compare_equal() -> None:
    assert NormKind(2) == NormKind(2.0)
    assert type(NormKind(2).p) is float
    assert hash(NormKind(2)) == hash(NormKind(2.0))


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="norm_type must be a number"):
        NormKind(math.nan)


@pytest.mark.parametrize("wrong", [None, [2]])
def test_what_is_no_number_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError):
        NormKind(wrong)  # type: ignore[arg-type]

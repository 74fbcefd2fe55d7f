"""``clip_grad_norm_`` on one process, on every backend: results, arguments, errors and what stays untouched."""

from __future__ import annotations

import math

import numpy as np
import pytest

import hyper_parallel
from tests.contract.backends import Kit, rounded
from tests.contract.clipping import ORDERS, VALUES, assert_clipped, factor, graded, gradients, untouched
from tests.unit.brute_force import norm_of

# ---- clip_grad_norm_


@pytest.mark.parametrize("p", ORDERS)
def test_clip_grad_norm_returns_the_norm_and_scales_in_place(kit: Kit, p: float) -> None:
    for dtype in kit.dtypes:
        parameters = graded(kit, dtype)
        objects = [parameter.grad for parameter in parameters]
        norm = hyper_parallel.clip_grad_norm_(parameters, 0.01, p)
        expected = norm_of(VALUES, p)
        assert kit.array(norm) == pytest.approx(float(rounded(expected, dtype)), rel=1e-6, abs=0)
        assert_clipped(kit, objects, VALUES, factor(0.01, expected), dtype)


@pytest.mark.parametrize("p", ORDERS)
def test_a_norm_below_max_norm_leaves_gradients_bitwise_untouched(kit: Kit, p: float) -> None:
    parameters = graded(kit)
    hyper_parallel.clip_grad_norm_(parameters, 1e6, p)
    assert untouched(kit, parameters)


@pytest.mark.parametrize("wrong", [-1, -1e-9, math.nan, -math.inf])
def test_negative_and_nan_max_norm_are_refused_before_anything_changes(kit: Kit, wrong: float) -> None:
    parameters = graded(kit)
    for call in (
        lambda: hyper_parallel.clip_grad_norm_(parameters, wrong),
        lambda: hyper_parallel.clip_grads_with_norm_(parameters, wrong, 1.0),
        lambda: hyper_parallel.clip_grads([parameter.grad for parameter in parameters], wrong),
    ):
        with pytest.raises(ValueError, match="max_norm"):
            call()
    assert untouched(kit, parameters)


def test_nan_norm_type_is_refused_before_anything_changes(kit: Kit) -> None:
    parameters = graded(kit)
    with pytest.raises(ValueError, match="norm_type"):
        hyper_parallel.clip_grad_norm_(parameters, 1.0, math.nan)
    assert untouched(kit, parameters)


@pytest.mark.parametrize("values", [VALUES, tuple(np.zeros_like(v) for v in VALUES)], ids=["nonzero", "zero"])
def test_max_norm_0_gives_zeros(kit: Kit, values: tuple) -> None:
    parameters = [kit.graded(v) for v in values]
    hyper_parallel.clip_grad_norm_(parameters, 0)
    assert all((found == 0).all() for found in gradients(kit, parameters))


@pytest.mark.parametrize("special", [1.0, math.inf, math.nan])
def test_max_norm_inf_only_measures(kit: Kit, special: float) -> None:
    values = (*VALUES, np.array([special]))
    parameters = [kit.graded(v) for v in values]
    norm = hyper_parallel.clip_grad_norm_(parameters, math.inf)
    assert kit.array(norm) == pytest.approx(norm_of(values, 2), rel=1e-6, nan_ok=True)
    assert untouched(kit, parameters, values)


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("p", [2.0, 1.0, math.inf])
def test_error_if_nonfinite_names_the_parameter_and_changes_nothing(
    kit: Kit, special: float, p: float
) -> None:
    members = {"first": kit.graded([1.0]), "culprit": kit.graded([2.0, special]), "last": kit.graded([100.0])}
    before = gradients(kit, list(members.values()))
    with pytest.raises(RuntimeError, match="culprit") as refused:
        hyper_parallel.clip_grad_norm_(kit.module(members), 1.0, p, error_if_nonfinite=True)
    assert "first" not in str(refused.value)
    assert "last" not in str(refused.value)
    assert untouched(kit, list(members.values()), before)


def test_error_if_nonfinite_numbers_the_tensors_of_a_list(kit: Kit) -> None:
    parameters = [kit.graded([1.0]), kit.graded([math.nan])]
    with pytest.raises(RuntimeError, match="tensor 1"):
        hyper_parallel.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


def test_error_if_nonfinite_accepts_a_finite_norm(kit: Kit) -> None:
    parameters = graded(kit)
    hyper_parallel.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert_clipped(kit, [parameter.grad for parameter in parameters], VALUES, factor(1.0, norm_of(VALUES, 2)))


def test_a_nan_gradient_makes_every_gradient_nan_without_error_if_nonfinite(kit: Kit) -> None:
    parameters = [kit.graded([1.0]), kit.graded([math.nan])]
    assert math.isnan(kit.array(hyper_parallel.clip_grad_norm_(parameters, 1.0)))
    assert all(np.isnan(found).all() for found in gradients(kit, parameters))


@pytest.mark.parametrize("value", [1e20, 1e-25])
def test_norms_whose_squares_leave_float32(kit: Kit, value: float) -> None:
    parameters = [kit.graded(np.full(4, value))]
    norm = hyper_parallel.clip_grad_norm_(parameters, 1.0)
    expected = 2 * value if kit.has_float64 else 0.0 if value < 1 else math.inf  # see known_differences
    assert kit.array(norm) == pytest.approx(expected, rel=1e-6, abs=0)


def test_the_coefficient_is_that_of_the_unrounded_norm_of_float16_overflow(kit: Kit) -> None:
    values = np.full(100, 60000.0)
    parameters = [kit.graded(values, "float16")]
    values = kit.array(parameters[0].grad)
    norm = hyper_parallel.clip_grad_norm_(parameters, 1000.0)
    assert kit.dtype(norm) == "float16"
    assert kit.array(norm) == math.inf  # 600,000 is beyond float16
    assert_clipped(kit, [parameters[0].grad], (values,), factor(1000.0, norm_of([values], 2)), "float16")

"""The public calls on one process, on every backend: results, arguments, errors and what stays untouched."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

import hyper_parallel
from tests.contract.backends import Kit, rounded
from tests.unit.brute_force import norm_of

ORDERS = (2.0, 1.0, 3.0, math.inf, -math.inf, 0.0, 0.5, -1.0)
VALUES = (np.array([3.0, -4.0, 0.5]), np.array([[1.0, 2.0], [-2.0, 0.25]]), np.array(-7.0))


def graded(kit: Kit, dtype: str = "float32") -> list:
    return [kit.graded(values, dtype) for values in VALUES]


def gradients(kit: Kit, parameters: list) -> list[np.ndarray]:
    return [kit.array(parameter.grad) for parameter in parameters]


def factor(max_norm: float, norm: float) -> float:
    return min(1.0, max_norm / (norm + 1e-6))


def assert_clipped(kit: Kit, found: list, originals: tuple, coefficient: float, dtype: str = "float32") -> None:
    """Each of ``found`` is the original times the coefficient, up to rounding of the result and the coefficient."""
    tolerance = {"float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 1e-6)
    for tensor, original in zip(found, originals, strict=True):
        assert kit.dtype(tensor) == dtype
        np.testing.assert_allclose(kit.array(tensor), original * coefficient, rtol=tolerance, atol=0)


def untouched(kit: Kit, parameters: list, originals=VALUES) -> bool:
    pairs = zip(gradients(kit, parameters), originals, strict=True)
    return all(np.array_equal(found, original, equal_nan=True) for found, original in pairs)


# ---- clip_grad_norm_


@pytest.mark.parametrize("p", ORDERS)
def test_clip_grad_norm_returns_the_norm_and_scales_in_place(kit: Kit, p: float) -> None:
    for dtype in kit.dtypes:
        parameters = graded(kit, dtype)
        objects = [parameter.grad for parameter in parameters]
        norm = hyper_parallel.clip_grad_norm_(parameters, 0.01, p)
        expected = norm_of(VALUES, p)
        assert kit.array(norm) == pytest.approx(float(rounded(expected, dtype)), rel=1e-6)
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
def test_error_if_nonfinite_names_the_parameter_and_changes_nothing(kit: Kit, special: float, p: float) -> None:
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
    assert kit.array(norm) == pytest.approx(2 * value, rel=1e-6)


def test_the_coefficient_is_that_of_the_unrounded_norm_of_float16_overflow(kit: Kit) -> None:
    values = np.full(100, 60000.0)
    parameters = [kit.graded(values, "float16")]
    values = kit.array(parameters[0].grad)
    norm = hyper_parallel.clip_grad_norm_(parameters, 1000.0)
    assert kit.dtype(norm) == "float16"
    assert kit.array(norm) == math.inf  # 600,000 is beyond float16
    assert_clipped(kit, [parameters[0].grad], (values,), factor(1000.0, norm_of([values], 2)), "float16")


# ---- what stands for parameters


@pytest.mark.parametrize("form", [list, tuple, iter, lambda ps: (p for p in ps)], ids=["list", "tuple", "iter", "generator"])
def test_any_iterable_is_read_once_and_scaled(kit: Kit, form) -> None:
    parameters = graded(kit)
    norm = hyper_parallel.clip_grad_norm_(form(parameters), 1.0)
    expected = norm_of(VALUES, 2)
    assert kit.array(norm) == pytest.approx(expected, rel=1e-6)
    assert_clipped(kit, [parameter.grad for parameter in parameters], VALUES, factor(1.0, expected))


def test_a_single_parameter(kit: Kit) -> None:
    parameter = kit.graded([3.0, 4.0])
    assert kit.array(hyper_parallel.clip_grad_norm_(parameter, 1.0)) == pytest.approx(5.0)
    assert kit.array(parameter.grad) == pytest.approx([0.6, 0.8])


def test_duplicates_count_once_and_are_scaled_once(kit: Kit) -> None:
    a, b = kit.graded([3.0]), kit.graded([4.0])
    norm = hyper_parallel.clip_grad_norm_([a, b, a, a, b], 1.0)
    assert kit.array(norm) == pytest.approx(5.0)
    assert kit.array(a.grad) == pytest.approx([0.6])
    assert kit.array(b.grad) == pytest.approx([0.8])


def test_frozen_parameters_take_no_part(kit: Kit) -> None:
    frozen = kit.graded([100.0])
    frozen.requires_grad = False
    learning = kit.graded([3.0, 4.0])
    assert kit.array(hyper_parallel.clip_grad_norm_([frozen, learning], 1.0)) == pytest.approx(5.0)
    assert kit.array(frozen.grad).tolist() == [100.0]


def test_main_grad_is_measured_and_scaled_and_grad_is_not(kit: Kit) -> None:
    parameter = kit.graded([100.0, 100.0])
    parameter.main_grad = kit.tensor([3.0, 4.0])
    assert kit.array(hyper_parallel.clip_grad_norm_([parameter], 1.0)) == pytest.approx(5.0)
    assert kit.array(parameter.main_grad) == pytest.approx([0.6, 0.8])
    assert kit.array(parameter.grad).tolist() == [100.0, 100.0]


def test_a_parameter_without_gradient_beside_others(kit: Kit) -> None:
    parameters = [kit.parameter([1.0]), kit.graded([3.0, 4.0]), kit.parameter([[1.0]])]
    assert kit.array(hyper_parallel.clip_grad_norm_(parameters, 1.0)) == pytest.approx(5.0)
    assert parameters[0].grad is None if hasattr(parameters[0], "grad") else True


def test_gradients_that_come_and_go_between_calls(kit: Kit) -> None:
    parameters = [kit.graded([3.0]), kit.graded([4.0])]
    for present, expected in (((0, 1), 5.0), ((0,), 3.0), ((1,), 4.0), ((0, 1), 5.0)):
        for index, value in enumerate((3.0, 4.0)):
            kit.set_grad(parameters[index], kit.tensor([value]) if index in present else None)
        assert kit.array(hyper_parallel.get_total_norm([p.grad for p in parameters if p.grad is not None])) == expected
        assert kit.array(hyper_parallel.clip_grad_norm_(parameters, 1.0)) == pytest.approx(expected)


def test_explicit_gradients_are_measured_and_scaled_instead_of_the_parameters_own(kit: Kit) -> None:
    parameters = [kit.graded([100.0]), kit.graded([100.0]), kit.parameter([1.0])]
    given = [kit.tensor([3.0]), None, kit.tensor([4.0])]
    norm = hyper_parallel.clip_grad_norm_(parameters, 1.0, grads=iter(given))
    assert kit.array(norm) == pytest.approx(5.0)
    assert kit.array(given[0]) == pytest.approx([0.6])
    assert kit.array(given[2]) == pytest.approx([0.8])
    assert kit.array(parameters[1].grad).tolist() == [100.0]


def test_gradients_that_are_not_as_many_as_the_parameters(kit: Kit) -> None:
    parameters = graded(kit)
    with pytest.raises(ValueError, match="2 gradients for 3 parameters"):
        hyper_parallel.clip_grad_norm_(parameters, 1.0, grads=[kit.tensor([1.0]), None])


@pytest.mark.parametrize("p", ORDERS)
def test_empty_and_0d_gradients(kit: Kit, p: float) -> None:
    values = (np.zeros((0, 3)), np.array(2.0), np.zeros(0), np.array([[1.0]]))
    parameters = [kit.graded(v) for v in values]
    norm = hyper_parallel.clip_grad_norm_(parameters, 0.5, p)
    assert kit.array(norm) == pytest.approx(norm_of(values, p), rel=1e-6)
    assert_clipped(kit, [q.grad for q in parameters], values, factor(0.5, norm_of(values, p)))


def test_a_transposed_gradient(kit: Kit) -> None:
    values = rounded(np.random.default_rng(0).standard_normal((5, 6)), "float32")
    parameter = kit.parameter(np.ones((6, 5)))
    gradient = kit.transposed(kit.tensor(values))
    norm = hyper_parallel.clip_grad_norm_([parameter], 1.0, grads=[gradient])
    assert kit.array(norm) == pytest.approx(norm_of([values], 2), rel=1e-6)
    assert_clipped(kit, [gradient], (values.T,), factor(1.0, norm_of([values], 2)))


def test_an_expanded_gradient_is_refused_or_scaled_right(kit: Kit) -> None:
    parameter, beside = kit.parameter(np.ones((4, 2))), kit.graded([1.0])
    gradient = kit.expanded(kit.tensor([[3.0]]), (4, 2))
    pair = [gradient, beside.grad]
    try:
        hyper_parallel.clip_grad_norm_([parameter, beside], 1.0, grads=pair)
    except ValueError as error:
        assert "expanded" in str(error)
        assert kit.array(beside.grad).tolist() == [1.0]
    else:
        assert_clipped(kit, pair, (np.full((4, 2), 3.0), np.ones(1)), factor(1.0, math.sqrt(73)))


# ---- nothing to do


@pytest.mark.parametrize("p", [p for p in ORDERS if p >= 0 or math.isinf(p)])
def test_an_empty_list_has_the_norm_of_nothing(kit: Kit, p: float) -> None:
    for norm in (hyper_parallel.clip_grad_norm_([], 1.0, p), hyper_parallel.get_total_norm([], p)):
        assert kit.dtype(norm) == "float32"
        assert tuple(norm.shape) == ()
        assert kit.array(norm) == (math.inf if p == -math.inf else 0.0)


@pytest.mark.parametrize("p", [p for p in ORDERS if p >= 0 or math.isinf(p)])
def test_no_gradient_at_all_warns_and_gives_float32(kit: Kit, p: float) -> None:
    parameters = [kit.parameter([1.0], "float16"), kit.parameter([2.0], "float16")]
    with pytest.warns(UserWarning, match="no tensor carries a gradient"):
        norm = hyper_parallel.clip_grad_norm_(parameters, 1.0, p)
    assert kit.dtype(norm) == "float32"
    assert kit.array(norm) == (math.inf if p == -math.inf else 0.0)


def test_gradients_passed_as_parameters_warn(kit: Kit) -> None:
    gradients = [kit.tensor([3.0]), kit.tensor([4.0])]
    with pytest.warns(UserWarning, match="gradients passed where parameters are expected"):
        hyper_parallel.clip_grads_with_norm_(gradients, 1.0, 5.0)
    assert [kit.array(gradient).tolist() for gradient in gradients] == [[3.0], [4.0]]


def test_an_ordinary_call_warns_of_nothing(kit: Kit) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hyper_parallel.clip_grad_norm_(graded(kit), 1.0)
        hyper_parallel.get_total_norm([kit.tensor([1.0])])
        hyper_parallel.clip_grads([kit.tensor([1.0]), None], 1.0)


# ---- the other calls


@pytest.mark.parametrize("p", ORDERS)
def test_get_total_norm_measures_gradients_and_changes_nothing(kit: Kit, p: float) -> None:
    tensors = [kit.tensor(values) for values in VALUES]
    for source in (tensors, iter(tensors)):
        assert kit.array(hyper_parallel.get_total_norm(source, p)) == pytest.approx(norm_of(VALUES, p), rel=1e-6)
    for tensor, values in zip(tensors, VALUES, strict=True):
        assert (kit.array(tensor) == values).all()


def test_get_total_norm_with_error_if_nonfinite(kit: Kit) -> None:
    with pytest.raises(RuntimeError, match="tensor 1"):
        hyper_parallel.get_total_norm([kit.tensor([1.0]), kit.tensor([math.inf])], error_if_nonfinite=True)


def test_clip_grads_with_norm_takes_a_number_or_what_get_total_norm_returns(kit: Kit) -> None:
    expected = norm_of(VALUES, 2)
    for as_tensor in (True, False):
        parameters = graded(kit)
        total = hyper_parallel.get_total_norm([parameter.grad for parameter in parameters])
        norm = total if as_tensor else float(total)
        assert hyper_parallel.clip_grads_with_norm_(parameters, 1.0, norm) is None
        assert_clipped(kit, [parameter.grad for parameter in parameters], VALUES, factor(1.0, expected))


def test_clip_grads_with_norm_uses_the_norm_it_is_given(kit: Kit) -> None:
    parameters = [kit.graded([3.0, 4.0])]
    hyper_parallel.clip_grads_with_norm_(parameters, 1.0, 10.0, grads=None)
    assert kit.array(parameters[0].grad) == pytest.approx([0.3, 0.4])
    hyper_parallel.clip_grads_with_norm_(parameters, 1.0, 0.5)
    assert kit.array(parameters[0].grad) == pytest.approx([0.3, 0.4])


@pytest.mark.parametrize("max_norm", [1.0, 1e6, 0.0, math.inf])
@pytest.mark.parametrize("with_params", [False, True])
def test_clip_grads_returns_new_gradients_and_leaves_the_old(kit: Kit, max_norm: float, with_params: bool) -> None:
    for dtype in kit.dtypes:
        tensors = [kit.tensor(values, dtype) for values in VALUES]
        given = [tensors[0], None, *tensors[1:]]
        params = [kit.parameter(np.ones(v.shape), dtype) for v in (VALUES[0], np.ones(2), *VALUES[1:])]
        clipped, norm = hyper_parallel.clip_grads(iter(given), max_norm, params=params if with_params else None)
        expected = norm_of(VALUES, 2)
        assert kit.array(norm) == pytest.approx(float(rounded(expected, dtype)), rel=1e-6)
        assert [c is None for c in clipped] == [False, True, False, False]
        present = [c for c in clipped if c is not None]
        assert_clipped(kit, present, VALUES, factor(max_norm, expected), dtype)
        assert all((kit.array(t) == v).all() for t, v in zip(tensors, VALUES, strict=True))


def test_the_result_has_the_promoted_dtype_and_each_gradient_keeps_its_own(kit: Kit) -> None:
    parameters = [kit.graded(np.full(128, 1 / 64), dtype) for dtype in kit.dtypes]
    norm = hyper_parallel.clip_grad_norm_(parameters, 1e-3)
    assert kit.dtype(norm) == "float64"
    assert kit.array(norm) == pytest.approx(math.sqrt(len(kit.dtypes) * 128) / 64, rel=1e-6)
    assert [kit.dtype(parameter.grad) for parameter in parameters] == list(kit.dtypes)


def test_foreach_gives_the_same_whatever_it_is(kit: Kit) -> None:
    for foreach in (None, False, True) if kit.has_foreach else (None, False):
        parameters = graded(kit)
        norm = hyper_parallel.clip_grad_norm_(parameters, 1.0, foreach=foreach)
        assert kit.array(norm) == pytest.approx(norm_of(VALUES, 2), rel=1e-6)
        assert_clipped(kit, [q.grad for q in parameters], VALUES, factor(1.0, norm_of(VALUES, 2)))

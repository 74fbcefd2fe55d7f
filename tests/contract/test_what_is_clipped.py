"""What may be passed as parameters and gradients, on one process, on every backend."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

import hyper_parallel
from tests.contract.backends import Kit, rounded
from tests.contract.clipping import ORDERS, VALUES, assert_clipped, factor, graded
from tests.unit.brute_force import norm_of

# ---- what stands for parameters


@pytest.mark.parametrize(
    "form", [list, tuple, iter, lambda ps: (p for p in ps)], ids=["list", "tuple", "iter", "generator"]
)
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
        assert (
            kit.array(hyper_parallel.get_total_norm([p.grad for p in parameters if p.grad is not None]))
            == expected
        )
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


def test_an_expanded_gradient_is_refused_before_anything_changes(kit: Kit) -> None:
    parameter, beside = kit.parameter(np.ones((4, 2))), kit.graded([1.0])
    expanded = kit.expanded(kit.tensor([[3.0]]), (4, 2))
    with pytest.raises(ValueError, match="expanded"):
        hyper_parallel.clip_grad_norm_([parameter, beside], 1.0, grads=[expanded, beside.grad])
    assert kit.array(beside.grad).tolist() == [1.0]
    assert (kit.array(expanded) == 3).all()


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

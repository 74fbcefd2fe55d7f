"""``get_total_norm``, ``clip_grads_with_norm_`` and ``clip_grads`` on one process, on every backend."""

from __future__ import annotations

import math

import numpy as np
import pytest

import hyper_parallel
from tests.contract.backends import Kit, rounded
from tests.contract.clipping import ORDERS, VALUES, assert_clipped, factor, graded
from tests.unit.brute_force import norm_of

# ---- the other calls


@pytest.mark.parametrize("p", ORDERS)
def test_get_total_norm_measures_gradients_and_changes_nothing(kit: Kit, p: float) -> None:
    tensors = [kit.tensor(values) for values in VALUES]
    for source in (tensors, iter(tensors)):
        assert kit.array(hyper_parallel.get_total_norm(source, p)) == pytest.approx(
            norm_of(VALUES, p), rel=1e-6
        )
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
def test_clip_grads_returns_new_gradients_and_leaves_the_old(
    kit: Kit, max_norm: float, with_params: bool
) -> None:
    for dtype in kit.dtypes:
        tensors = [kit.tensor(values, dtype) for values in VALUES]
        given = [tensors[0], None, *tensors[1:]]
        params = [kit.parameter(np.ones(v.shape), dtype) for v in (VALUES[0], np.ones(2), *VALUES[1:])]
        clipped, norm = hyper_parallel.clip_grads(
            iter(given), max_norm, params=params if with_params else None
        )
        expected = norm_of(VALUES, 2)
        assert kit.array(norm) == pytest.approx(float(rounded(expected, dtype)), rel=1e-6)
        assert [c is None for c in clipped] == [False, True, False, False]
        present = [c for c in clipped if c is not None]
        assert_clipped(kit, present, VALUES, factor(max_norm, expected), dtype)
        assert all((kit.array(t) == v).all() for t, v in zip(tensors, VALUES, strict=True))


def test_the_result_has_the_promoted_dtype_and_each_gradient_keeps_its_own(kit: Kit) -> None:
    parameters = [kit.graded(np.full(128, 1 / 64), dtype) for dtype in kit.dtypes]
    norm = hyper_parallel.clip_grad_norm_(parameters, 1e-3)
    assert kit.dtype(norm) == ("float64" if kit.has_float64 else "float32")
    assert kit.array(norm) == pytest.approx(math.sqrt(len(kit.dtypes) * 128) / 64, rel=1e-6)
    assert [kit.dtype(parameter.grad) for parameter in parameters] == list(kit.dtypes)


def test_foreach_gives_the_same_whatever_it_is(kit: Kit) -> None:
    for foreach in (None, False, True) if kit.has_foreach else (None, False):
        parameters = graded(kit)
        norm = hyper_parallel.clip_grad_norm_(parameters, 1.0, foreach=foreach)
        assert kit.array(norm) == pytest.approx(norm_of(VALUES, 2), rel=1e-6)
        assert_clipped(kit, [q.grad for q in parameters], VALUES, factor(1.0, norm_of(VALUES, 2)))


def test_a_single_gradient_is_clipped_out_of_place(kit: Kit) -> None:
    gradient = kit.tensor([3.0, 4.0])
    (clipped,), norm = hyper_parallel.clip_grads(gradient, 1.0)
    assert kit.array(norm) == 5.0
    assert kit.array(clipped) == pytest.approx([0.6, 0.8], rel=1e-6)
    assert kit.array(gradient) == pytest.approx([3.0, 4.0])

"""Memory that several gradients share is scaled once; products of 16-bit gradients are rounded once."""

from __future__ import annotations

import math

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from hyper_parallel import NormKind
from hyper_parallel_mindspore.host_math import HostMath
from tests.mindspore_backend.oracle import norm
from tests.mindspore_backend.tensors import array, tensor

DTYPES = ("float32", "bfloat16", "float16", "float64")
MATH = HostMath()


def norm_of(tensors: list[Tensor], p: float) -> float:
    kind = NormKind(p)
    return float(kind.root(MATH.statistic(tensors, kind, None)))


def scale(tensors: list[Tensor], coefficient: float) -> None:
    MATH.scale_(tensors, tensor(coefficient), None)


# ---- memory that several tensors share


def test_a_tensor_that_appears_twice_counts_twice_and_is_scaled_once() -> None:
    held = tensor([3.0, 4.0])
    assert norm_of([held, held], 2.0) == pytest.approx(50**0.5)
    scale([held, held, held.reshape(2, 1)], 0.5)
    assert held.asnumpy().tolist() == [1.5, 2.0]


def test_overlapping_tensors_are_scaled_once() -> None:
    whole = tensor(np.arange(12.0).reshape(3, 4))
    scale([whole[1:], whole[:2], whole.T, whole.reshape(-1)[3:5]], 0.5)
    np.testing.assert_array_equal(whole.asnumpy(), np.arange(12.0).reshape(3, 4) / 2)
    part = tensor(np.arange(12.0))
    scale([part[2:6], part[4:9]], 0.5)
    np.testing.assert_array_equal(part.asnumpy(), [0, 1, 1, 1.5, 2, 2.5, 3, 3.5, 4, 9, 10, 11])


def test_interleaved_views_are_scaled_once_each() -> None:
    whole = tensor(np.arange(12.0).reshape(3, 4))
    scale([whole[:, ::2], whole[:, 1::2], whole[:, ::2]], 0.5)
    np.testing.assert_array_equal(whole.asnumpy(), np.arange(12.0).reshape(3, 4) / 2)


def test_a_sparse_view_of_another_gradient_is_refused() -> None:
    whole = tensor(np.arange(12.0).reshape(3, 4))
    for tensors in ([whole, whole[:, ::2]], [whole[:, :2], whole[:, 1:]]):
        with pytest.raises(ValueError, match="belong to another gradient"):
            MATH.statistic(tensors, NormKind(2), None)
        with pytest.raises(ValueError, match="belong to another gradient"):
            scale(tensors, 0.5)
    np.testing.assert_array_equal(whole.asnumpy(), np.arange(12.0).reshape(3, 4))


def test_gradients_of_a_sum_share_memory_and_are_scaled_once() -> None:
    a, b = Parameter(tensor([1.0, 2.0]), name="a"), Parameter(tensor([3.0, 4.0]), name="b")
    _, gradients = mindspore.value_and_grad(lambda: ((a + b) * tensor([3.0, 4.0])).sum(), None, [a, b])()
    assert norm_of(list(gradients), 2.0) == pytest.approx(50**0.5)
    scale(list(gradients), 0.5)
    assert [g.asnumpy().tolist() for g in gradients] == [[1.5, 2.0]] * 2


# ---- rounding


@pytest.mark.parametrize("coefficient", [0.3, 1 / 3, 0.9999, 1e-5, 1e-30, 0.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_number_is_rounded_once_to_even(dtype: str, coefficient: float) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    if dtype == "float16":
        values = bits.view(np.float16).astype(np.float32)
    else:
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    held = Tensor(values).astype(getattr(mindspore, dtype))
    np.testing.assert_array_equal(array(held), values)
    new = array(MATH.scaled([held], tensor(coefficient))[0])
    scale([held], coefficient)
    with np.errstate(invalid="ignore", over="ignore"):
        product = values * np.float32(coefficient)
    finite = np.isfinite(product)
    expected = np.where(finite, 0.0, product)
    if dtype == "float16":
        expected[finite] = product[finite].astype(np.float16)
    else:  # MindSpore's own cast of the float32 product
        expected[finite] = (
            Tensor(product[finite]).astype(mindspore.bfloat16).astype(mindspore.float32).asnumpy()
        )
    np.testing.assert_array_equal(array(held), expected)
    np.testing.assert_array_equal(new, expected)


@pytest.mark.parametrize("coefficient", [math.nan, math.inf, -math.nan])
def test_a_nonfinite_coefficient(coefficient: float) -> None:
    for dtype in DTYPES:
        held = tensor([1.0, -2.0, 0.0, math.inf], dtype)
        scale([held], coefficient)
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(array(held), np.array([1.0, -2.0, 0.0, math.inf]) * coefficient)


def test_float64_gradients_are_measured_in_float64() -> None:
    values = np.random.default_rng(0).standard_normal(1000) * 1e-100
    assert norm_of([Tensor(values)], 2.0) == pytest.approx(norm([values], 2.0), rel=1e-12, abs=0)

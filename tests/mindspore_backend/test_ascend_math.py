"""The arithmetic for NPUs, as far as the CPU has its operations; nothing here was run on an NPU."""

from __future__ import annotations

import math

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

from hyper_parallel import NormKind
from hyper_parallel_mindspore.ascend_math import AscendMath
from tests.mindspore_backend.oracle import norm, rounded
from tests.mindspore_backend.tensors import array, tensor

ORDERS = (2.0, 1.0, 3.0, 0.5, 0.0, -1.0, math.inf, -math.inf)
DTYPES = ("float32", "bfloat16", "float16")
MATH = AscendMath()


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistic(dtype: str, p: float) -> None:
    parts = [rounded(random(*shape, seed=i), dtype) for i, shape in enumerate([(4097,), (3, 5), (8192,), ()])]
    tensors = [*(tensor(part, dtype) for part in parts), tensor(np.zeros((0, 2)), dtype)]
    found = MATH.statistic(tensors, NormKind(p), None)
    assert found.dtype == mindspore.float32
    assert found.shape == ()
    expected = norm(parts, p)
    assert float(NormKind(p).root(found.asnumpy())) == pytest.approx(expected, rel=2e-6, abs=0)


@pytest.mark.parametrize("p", [p for p in ORDERS if p != 0])
@pytest.mark.parametrize("where", [0, 100, 4095, 4096, 4999])
def test_nan_survives(where: int, p: float) -> None:
    values = random(5000)
    values[where] = math.nan
    for tensors in ([tensor(values), tensor([1.0])], [tensor([1.0]), tensor(values)]):
        assert math.isnan(float(array(MATH.statistic(tensors, NormKind(p), None))))


@pytest.mark.parametrize("p", ORDERS)
def test_nothing_gives_the_identity(p: float) -> None:
    kind = NormKind(p)
    assert float(array(MATH.statistic([tensor(np.zeros((0, 3)))], kind, None))) == kind.identity


def test_pack_read_where_and_cast() -> None:
    statistic = MATH.statistic([tensor([3.0, 4.0])], NormKind(2), None)
    buffer = MATH.pack([1.0, 0.0, statistic, 2.0, statistic != statistic], None)
    assert buffer.dtype == mindspore.float32
    assert MATH.read(buffer, True) == [1.0, 0.0, 25.0, 2.0, 0.0]
    assert MATH.read(buffer, False) is None
    assert MATH.read(MATH.where(buffer[2] > 1, 1.0, buffer[3]), True) == [1.0]
    assert MATH.read(MATH.where(buffer[1] > 1, 1.0, buffer[3]), True) == [2.0]
    for value in (statistic, 25.0, buffer[2]):
        found = MATH.cast(value, mindspore.bfloat16, None)
        assert (found.shape, found.dtype, float(array(found))) == ((), mindspore.bfloat16, 25.0)


def test_scaling_in_place_of_16_bit_gradients_and_out_of_place() -> None:
    for dtype in DTYPES:
        held = tensor([3.0, -5.0], dtype)
        (new,) = MATH.scaled([held], tensor(0.3))
        expected = rounded(np.float32([3.0, -5.0]) * np.float32(0.3), dtype)
        np.testing.assert_array_equal(array(new), expected)
        assert new.dtype == held.dtype
        assert array(held).tolist() == [3.0, -5.0]
        if dtype != "float32":  # Tensor.mul_ works in place on an NPU only
            MATH.scale_([held, held], tensor(0.3), None)
            np.testing.assert_array_equal(array(held), expected)


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(ValueError, match="expanded"):
        MATH.statistic([tensor([1.0]), tensor([[1.0]]).broadcast_to((4, 2))], NormKind(2), None)
    with pytest.raises(TypeError, match=r"numpy.ndarray.*mindspore"):
        MATH.statistic([np.ones(2)], NormKind(2), None)


def test_the_other_operations() -> None:
    held = tensor([[-3.0, 0.5, math.nan], [2.0, 1.0, -0.25]])
    pieces = [(held, 3, 5), (None, 0, 1), (tensor([7.0], "bfloat16"), 0, 1)]
    assert array(MATH.flatten(pieces, 6, -1.0, None)).tolist() == [2, 1, -1, 7, -1, -1]
    assert MATH.nonfinite_count(held) == 1
    assert MATH.nonfinite_count(tensor([])) == 0
    assert float(array(MATH.checksum(held))) == float(array(MATH.checksum(held + 0)))
    assert float(array(MATH.checksum(held))) != float(array(MATH.checksum(held * 2)))
    MATH.clamp_([held, tensor([])], 1.0, None)
    np.testing.assert_array_equal(array(held), [[-1.0, 0.5, math.nan], [1.0, 1.0, -0.25]])
    with pytest.raises(RuntimeError, match="foreach"):
        MATH.statistic([Tensor([1.0])], NormKind(2), True)

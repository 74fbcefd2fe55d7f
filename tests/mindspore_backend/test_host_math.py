"""Statistics and scaling on the CPU, on every kind of tensor that MindSpore makes."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from hyper_parallel import NormKind
from hyper_parallel_mindspore.host_math import HostMath
from tests.mindspore_backend.oracle import clipped, norm, rounded
from tests.mindspore_backend.tensors import array, tensor

ORDERS = (2.0, 1.0, 3.0, 0.5, 0.0, -1.0, -2.5, math.inf, -math.inf)
DTYPES = ("float32", "bfloat16", "float16", "float64")
MATH = HostMath()


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def norm_of(tensors: list[Tensor], p: float) -> float:
    kind = NormKind(p)
    return float(kind.root(MATH.statistic(tensors, kind, None)))


def scale(tensors: list[Tensor], coefficient: float) -> None:
    MATH.scale_(tensors, tensor(coefficient), None)


# ---- every kind of tensor, and every view of one


@mindspore.jit
def doubled(x: Tensor) -> Tensor:
    return x * 2


BASES: dict[str, Callable[[np.ndarray], Tensor]] = {
    "from an array": Tensor,
    "sharing an array": lambda a: Tensor.from_numpy(a.copy()),
    "from a list": lambda a: Tensor(a.tolist(), mindspore.float32),
    "parameter": lambda a: Parameter(Tensor(a)),
    "result of an operation": lambda a: Tensor(a) * 1,
    "result of jit": lambda a: doubled(Tensor(a / 2)),
    "result of mint": lambda a: mint.cat([Tensor(a[:1]), Tensor(a[1:])]),
    "zeros and a copy": lambda a: ops.zeros(a.shape, mindspore.float32).copy_(Tensor(a)),
    "reshaped": lambda a: Tensor(a.reshape(-1)).reshape(a.shape),
    "contiguous copy of a view": lambda a: Tensor(np.ascontiguousarray(a.T)).T.contiguous(),
}
VIEWS: dict[str, Callable] = {
    "whole": lambda t: t,
    "rows": lambda t: t[2:5],
    "first rows": lambda t: t[:2],
    "columns": lambda t: t[:, 1:3],
    "every other column": lambda t: t[:, ::2],
    "one column": lambda t: t[:, 1],
    "transposed": lambda t: t.T,
    "transposed rows": lambda t: t[1:4].T,
    "narrow": lambda t: t.narrow(1, 1, 2) if hasattr(t, "narrow") else t[:, 1:3],
    "split": lambda t: mint.split(t, 2)[1],
    "one element": lambda t: t[1:2, 2:3].reshape(()),
    "with a dim of one": lambda t: t[:, None],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_any_tensor_is_measured_and_scaled_in_place(base: Callable, view: Callable) -> None:
    values = random(6, 5).astype(np.float32)
    whole, expected = base(values), values.astype(np.float64)
    held, part = view(whole), view(expected) if view is not VIEWS["split"] else expected[2:4]
    assert norm_of([held], 2.0) == pytest.approx(norm([part], 2.0), rel=1e-6, abs=0)
    scale([held], 0.25)
    part *= 0.25
    # MindSpore sees it in the view, in what it is a view of, and in what is computed from either
    np.testing.assert_allclose(held.asnumpy(), part, rtol=1e-6)
    np.testing.assert_allclose((held + 0).asnumpy(), part, rtol=1e-6)
    np.testing.assert_allclose(whole.asnumpy(), expected, rtol=1e-6)
    np.testing.assert_allclose((whole + 0).asnumpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_any_dtype(dtype: str, view: Callable) -> None:
    values = rounded(random(6, 5), dtype)
    whole = tensor(values, dtype)
    if view is VIEWS["split"]:
        view = VIEWS["rows"]
    held, part = view(whole), view(values)
    for p in ORDERS:
        assert norm_of([held], p) == pytest.approx(norm([part], p), rel=1e-6, abs=0)
    part[...] = clipped(part, dtype, 1.0, 0.3)
    scale([held], 0.3 / (1.0 + 1e-6))
    np.testing.assert_allclose(array(whole), values, rtol=1e-7 if dtype == "float64" else 0)


def test_large_views_are_taken_in_blocks() -> None:
    values = random(3, 400, 700).astype(np.float32)
    for view in (lambda t: t[:, :, 1:], lambda t: t[:, 1:, :], lambda t: t[1:, :, ::2]):
        whole, expected = Tensor(values), values.astype(np.float64)
        for p in (2.0, 1.0, math.inf, -math.inf, 0.0):
            assert norm_of([view(whole)], p) == pytest.approx(norm([view(expected)], p), rel=1e-6, abs=0)
        scale([view(whole)], 0.5)
        view(expected)[...] *= 0.5
        np.testing.assert_array_equal(whole.asnumpy(), expected.astype(np.float32))


def test_operations_under_way_are_waited_for() -> None:
    large = Tensor(np.ones((800, 800), np.float32))
    gradient = large @ large
    reader = gradient + large @ large
    scale([gradient], 0.5)
    assert (gradient.asnumpy() == 400).all()
    assert (reader.asnumpy() == 1600).all()


def test_an_expanded_tensor_is_refused_before_anything_is_written() -> None:
    first, expanded = tensor([2.0]), tensor([[1.0]]).broadcast_to((4, 2))
    with pytest.raises(ValueError, match="expanded"):
        MATH.statistic([first, expanded], NormKind(2), None)
    with pytest.raises(ValueError, match="expanded"):
        scale([first, expanded], 0.5)
    assert first.asnumpy() == 2.0


# ---- accuracy and cost


@pytest.mark.parametrize("value", [1.0, 1.1, 1.3333, 1.7, 0.1, 3e-3])
@pytest.mark.parametrize("size", [1023, 1024, 10_000_019])
def test_equal_elements_do_not_drift(size: int, value: float) -> None:
    held = np.full(size, value, np.float32)
    assert norm_of([Tensor(held)], 2.0) == pytest.approx(float(held[0]) * size**0.5, rel=3e-7, abs=0)


def test_1e8_elements() -> None:
    held = np.tile(np.random.default_rng(0).standard_normal(10**6).astype(np.float32), 100)
    exact = norm([held[: 10**6]], 2.0) * 10.0
    gradient = Tensor.from_numpy(held)
    tracemalloc.start()
    assert norm_of([gradient], 2.0) == pytest.approx(exact, rel=1e-7, abs=0)
    assert norm_of([gradient], 0.0) == np.count_nonzero(held)
    scale([gradient], 0.5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20
    assert norm_of([gradient], 2.0) == pytest.approx(exact / 2, rel=1e-7, abs=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_many_16_bit_elements(dtype: str) -> None:
    held = tensor(random(1_000_003) * 100, dtype)
    for p in (2.0, 1.0, math.inf):
        assert norm_of([held], p) == pytest.approx(norm([array(held)], p), rel=1e-7, abs=0)


@pytest.mark.parametrize("value", [1e20, 1e-20, 1.3e-21, 7e-22, 1e-25, 1e-38, 1e-45, 3e38])
def test_squares_outside_of_float32(value: float) -> None:
    held = np.full(3000, value, np.float32)
    assert norm_of([Tensor(held)], 2.0) == pytest.approx(float(held[0]) * 3000**0.5, rel=1e-6, abs=0)
    assert norm_of([Tensor(held), tensor([0.0])], 3.0) == pytest.approx(
        float(held[0]) * 3000 ** (1 / 3), rel=1e-6, abs=0
    )


# ---- the other operations


def test_clamp_in_place() -> None:
    for dtype in DTYPES:
        values = np.array([-3.0, -0.5, 0.25, 3.0, math.nan, math.inf])
        held, transposed = tensor(values, dtype), tensor(values.reshape(2, 3), dtype)
        MATH.clamp_([held, transposed.T], 1.0, None)
        for found in (array(held), array(transposed).reshape(-1)):
            np.testing.assert_array_equal(found, np.clip(values, -1, 1))


def test_flatten_takes_pieces_in_the_order_of_indices() -> None:
    whole = tensor(np.arange(6.0).reshape(2, 3), "bfloat16")
    pieces = [(whole, 1, 4), (None, 0, 2), (whole.T, 0, 3), (tensor([7.0]), 0, 1)]
    found = MATH.flatten(pieces, 12, -1.0, None)
    assert found.dtype == np.float32
    assert found.tolist() == [1, 2, 3, -1, -1, 0, 3, 1, 7, -1, -1, -1]
    assert MATH.flatten([(found, 1, 3), (tensor([]), 0, 0)], 3, -1.0, None).tolist() == [2, 3, -1]
    assert float(MATH.statistic([found[0:3], found[5:7]], NormKind(2), None)) == 23.0


def test_checksum_tells_tensors_apart_and_not_layouts() -> None:
    held = tensor([[1.0, 2.0], [3.0, 4.0]])
    same = tensor([[1.0, 3.0], [2.0, 4.0]]).T
    assert float(MATH.checksum(held)) == float(MATH.checksum(same))
    assert float(MATH.checksum(held)) != float(MATH.checksum(held.T))
    assert float(MATH.checksum(held)).is_integer()


def test_scaled_gradients_keep_their_kind_and_the_originals() -> None:
    for dtype in DTYPES:
        held = tensor([[1.0, 2.0, 3.0]], dtype)
        (new,) = MATH.scaled([held[:, 1:]], tensor(0.5))
        assert new.dtype == held.dtype
        assert new.shape == (1, 2)
        assert array(new).tolist() == [[1.0, 1.5]]
        assert array(new * 2).tolist() == [[2.0, 3.0]]
        assert array(held).tolist() == [[1.0, 2.0, 3.0]]


def test_a_norm_is_cast_to_a_tensor_of_the_dtype() -> None:
    for dtype in DTYPES:
        found = MATH.cast(MATH.statistic([tensor([3.0])], NormKind(1), None), getattr(mindspore, dtype), None)
        assert isinstance(found, Tensor)
        assert (found.shape, str(found.dtype).lower(), array(found)) == ((), dtype, 3.0)
    assert MATH.cast(1e300, None, None).asnumpy() == math.inf


def test_the_coefficient_has_the_bits_of_float32_arithmetic() -> None:
    for seed in range(200):
        total, max_norm = np.exp(np.random.default_rng(seed).uniform(-15, 15, 2))
        ratio = float(max_norm) / (MATH.cast(float(total), None, None) + 1e-6)
        assert ratio.dtype == mindspore.float32
        inverse = np.float32(1) / (np.float32(total) + np.float32(1e-6))
        assert ratio.asnumpy() in (
            inverse * np.float32(max_norm),
            np.float32(max_norm) / (np.float32(total) + np.float32(1e-6)),
        )


def test_a_cell_on_the_cpu_trains_with_the_clipped_gradients() -> None:
    net = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
    x = tensor([[1.0, 2.0, 2.0]])
    _, gradients = mindspore.value_and_grad(lambda: net(x).sum(), None, list(net.trainable_params()))()
    scale(list(gradients), 0.5)
    nn.SGD(net.trainable_params(), 1.0)(gradients)
    np.testing.assert_allclose(net.weight.asnumpy(), [[0.5, 0.0, 0.0]])
    np.testing.assert_allclose(net.bias.asnumpy(), [-0.5])

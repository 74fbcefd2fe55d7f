"""``TensorMath.statistic`` of every adapter against NumPy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hyper_parallel.core.norm import NormKind
from hyper_parallel.platforms import get_platform
from tests.contract.backends import Kit, rounded

ORDERS = (2.0, 1.0, 3.0, 1.5, 0.5, -1.0, 0.0, math.inf, -math.inf)
SHAPES = ((), (1,), (7,), (3, 5), (2, 3, 4), (4096,), (5000,), (3, 4097))


def statistic_of(values: np.ndarray, p: float) -> float:
    magnitudes = np.abs(values.reshape(-1))
    if math.isinf(p):
        return float(magnitudes.max() if p > 0 else magnitudes.min())
    return float(np.count_nonzero(magnitudes)) if p == 0 else float(np.sum(magnitudes**p))


def statistic(tensors: list, p: float, foreach: bool | None = None) -> float:
    return float(get_platform().statistic(tensors, NormKind(p), foreach))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Values away from zero, of both signs, that any dtype holds without overflow."""
    generator = np.random.default_rng(seed)
    return generator.uniform(0.25, 4.0, shape) * generator.choice([-1.0, 1.0], shape)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_tensor(kit: Kit, p: float, shape: tuple[int, ...]) -> None:
    values = rounded(random(*shape), "float32")
    assert statistic([kit.tensor(values)], p) == pytest.approx(statistic_of(values, p), rel=1e-6, abs=0)


@pytest.mark.parametrize("p", ORDERS)
def test_tensors_of_every_dtype_together(kit: Kit, p: float) -> None:
    parts = [rounded(random(50, seed=seed), dtype) for seed, dtype in enumerate(kit.dtypes)]
    tensors = [kit.tensor(part, dtype) for part, dtype in zip(parts, kit.dtypes, strict=True)]
    assert statistic(tensors, p) == pytest.approx(statistic_of(np.concatenate(parts), p), rel=1e-6, abs=0)


@pytest.mark.parametrize("p", ORDERS)
def test_each_dtype_is_accumulated_in_float32_or_wider(kit: Kit, p: float) -> None:
    for dtype in kit.dtypes:
        values = rounded(random(20000), dtype)
        expected = statistic_of(values, p)
        assert statistic([kit.tensor(values, dtype)], p) == pytest.approx(expected, rel=1e-6, abs=0), dtype


@pytest.mark.parametrize("p", ORDERS)
def test_the_same_tensor_twice_counts_twice(kit: Kit, p: float) -> None:
    values = rounded(random(9), "float32")
    tensor = kit.tensor(values)
    assert statistic([tensor, tensor], p) == pytest.approx(
        statistic_of(np.tile(values, 2), p), rel=1e-6, abs=0
    )


def test_zeros_are_not_counted_for_p_0(kit: Kit) -> None:
    values = np.array([0.0, -0.0, 1e-30, -2.0, 0.0, 3.0])
    assert statistic([kit.tensor(values), kit.tensor(np.zeros(5000))], 0) == 3


def test_the_count_of_many_elements_is_exact(kit: Kit) -> None:
    tensors = [
        kit.tensor(np.ones(2**24 - 1, np.float32)),
        kit.tensor(np.ones((2, 1))),
        kit.tensor(np.ones(1)),
    ]
    assert statistic(tensors, 0) == 2**24 + 2


@pytest.mark.parametrize(
    ("p", "identity"), [(2, 0), (1, 0), (0, 0), (-1, 0), (math.inf, 0), (-math.inf, math.inf)]
)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)], ids=str)
def test_empty_tensors_give_the_identity(kit: Kit, p: float, identity: float, shape: tuple[int, ...]) -> None:
    for dtype in kit.dtypes:
        assert statistic([kit.tensor(np.zeros(shape), dtype)], p) == identity


@pytest.mark.parametrize("p", ORDERS)
def test_empty_tensors_change_nothing_beside_others(kit: Kit, p: float) -> None:
    values = rounded(random(6), "float32")
    tensors = [kit.tensor(np.zeros((0, 2))), kit.tensor(values), kit.tensor(np.zeros(0))]
    assert statistic(tensors, p) == pytest.approx(statistic_of(values, p), rel=1e-6, abs=0)


@pytest.mark.parametrize("p", [p for p in ORDERS if p != 0])
@pytest.mark.parametrize("position", [0, 1, 4095, 4096, 5999])
def test_nan_survives_wherever_it_stands(kit: Kit, p: float, position: int) -> None:
    values = random(6000)
    values[position] = math.nan
    for dtype in kit.dtypes:
        assert math.isnan(statistic([kit.tensor(np.ones(3)), kit.tensor(values, dtype)], p)), dtype
        assert math.isnan(statistic([kit.tensor(values, dtype), kit.tensor(np.ones(3))], p)), dtype


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_infinity_survives(kit: Kit, p: float) -> None:
    for value in (math.inf, -math.inf):
        assert statistic([kit.tensor([1.0, value, 2.0])], p) == math.inf


@pytest.mark.parametrize("p", [2.0, 3.0])
def test_float16_squares_do_not_overflow(kit: Kit, p: float) -> None:
    values = np.full(1000, 60000.0)
    values = rounded(values, "float16")
    assert statistic([kit.tensor(values, "float16")], p) == pytest.approx(
        statistic_of(values, p), rel=1e-6, abs=0
    )


@pytest.mark.parametrize("size", [3, 5000])
@pytest.mark.parametrize("value", [1e20, 1e-25, 1e-38])
@pytest.mark.parametrize("p", [2.0, 3.0])
def test_powers_beyond_float32_give_the_right_norm(kit: Kit, value: float, p: float, size: int) -> None:
    values = rounded(np.full(size, value), "float32")
    norm = float(
        get_platform().cast(
            get_platform().statistic([kit.tensor(values)], NormKind(p), None) ** (1 / p), None, None
        )
    )
    expected = float(values[0]) * size ** (1 / p)
    if not kit.has_float64:  # see known_differences
        expected = 0.0 if value < 1 else math.inf
    assert norm == pytest.approx(expected, rel=1e-6, abs=0)


def test_small_and_large_tensors_in_one_call(kit: Kit) -> None:
    tensors = [kit.tensor([3e20]), kit.tensor([4e20]), kit.tensor([1e-20])]
    expected = 5e20 if kit.has_float64 else math.inf  # see known_differences
    assert statistic(tensors, 2) ** 0.5 == pytest.approx(expected, rel=1e-6, abs=0)


def test_a_transposed_tensor_counts_as_its_contiguous_copy(kit: Kit) -> None:
    values = rounded(random(70, 80), "float32")
    assert statistic([kit.transposed(kit.tensor(values))], 2) == pytest.approx(
        statistic_of(values, 2), rel=1e-6
    )


def test_an_expanded_tensor_is_refused(kit: Kit) -> None:
    with pytest.raises(ValueError, match="expanded"):
        statistic([kit.tensor([1.0]), kit.expanded(kit.tensor([[3.0]]), (4, 2))], 2)


@pytest.mark.parametrize("p", ORDERS)
def test_without_foreach_the_result_is_as_good(kit: Kit, p: float) -> None:
    parts = [rounded(random(5, seed=seed), "float32") for seed in range(4)]
    tensors = [kit.tensor(part) for part in parts]
    assert statistic(tensors, p, foreach=False) == pytest.approx(
        statistic_of(np.concatenate(parts), p), rel=1e-6
    )


def test_foreach_true_works_or_says_that_there_are_no_kernels(kit: Kit) -> None:
    if kit.has_foreach:
        assert statistic([kit.tensor([3.0]), kit.tensor([4.0])], 2, foreach=True) == pytest.approx(25.0)
    else:
        with pytest.raises(RuntimeError, match="foreach"):
            statistic([kit.tensor([3.0])], 2, foreach=True)


def test_tensors_are_left_as_they_are(kit: Kit) -> None:
    values = rounded(random(5000), "float32")
    tensor = kit.tensor(values)
    for p in ORDERS:
        statistic([tensor], p)
    assert (kit.array(tensor) == values).all()

"""The other methods of ``TensorMath``: buffers, scalars, scaling and counting."""

from __future__ import annotations

import itertools
import math
import operator

import numpy as np
import pytest

from hyper_parallel.core.norm import NormKind
from hyper_parallel.interface import Platform
from hyper_parallel.platforms import get_platform
from tests.contract.backends import Kit, rounded


@pytest.fixture
def platform(kit: Kit) -> Platform:
    return get_platform()


def scalar(platform: Platform, value: float):
    """A scalar as the platform makes them."""
    return platform.pack([value], None)[0]


def number(platform: Platform, value) -> float:
    return platform.read(value, True)[0]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).standard_normal(shape) * 3


# ---- buffers and scalars


def test_pack_mixes_scalars_and_numbers_in_order(kit: Kit, platform: Platform) -> None:
    tensor = kit.tensor([3.0, 4.0])
    statistic = platform.statistic([tensor], NormKind(2), None)
    buffer = platform.pack([1, statistic, 0.5, statistic != statistic, True, math.inf], tensor)
    assert platform.read(buffer, True) == [1.0, 25.0, 0.5, 0.0, 1.0, math.inf]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 1e30, -7.25])
def test_pack_and_read_keep_special_values(platform: Platform, kit: Kit, value: float) -> None:
    (result,) = platform.read(platform.pack([value], kit.tensor([1.0])), True)
    assert result == pytest.approx(value, nan_ok=True)
    assert math.copysign(1, result) == math.copysign(1, value) or math.isnan(value)


def test_pack_does_not_round_to_the_dtype_of_like(kit: Kit, platform: Platform) -> None:
    for dtype in kit.dtypes:
        (result,) = platform.read(platform.pack([1 / 3], kit.tensor([1.0], dtype)), True)
        assert result == pytest.approx(1 / 3, rel=1e-7)


def test_a_count_beyond_float32_stays_exact_where_there_is_float64(kit: Kit, platform: Platform) -> None:
    (result,) = platform.read(platform.pack([2.0**24 + 1], kit.tensor([1.0])), True)
    assert result == (2**24 + 1 if kit.has_float64 else 2**24)


def test_the_buffer_is_one_dimensional_and_indexed_by_scalars(platform: Platform) -> None:
    buffer = platform.pack([1.0, 2.0, 3.0], None)
    assert tuple(buffer.shape) == (3,)
    assert tuple(buffer[1].shape) == ()
    assert number(platform, buffer[1]) == 2.0


def test_a_buffer_is_new_memory_since_it_is_reduced_in_place(kit: Kit, platform: Platform) -> None:
    tensor, one = kit.tensor([3.0, 4.0]), scalar(platform, 5.0)
    for buffer in (platform.pack([one], tensor), platform.flatten([(tensor, 0, 2)], 2, 0.0, tensor)):
        buffer[:] = 0.0
        assert set(platform.read(buffer, True)) == {0.0}
    assert number(platform, one) == 5.0
    np.testing.assert_array_equal(kit.array(tensor), [3.0, 4.0])


def test_read_without_waiting_gives_the_values_or_none(platform: Platform) -> None:
    assert platform.read(platform.pack([1.5], None), False) in ([1.5], None)


BINARY = (operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.pow)


@pytest.mark.parametrize("operation", BINARY, ids=lambda operation: operation.__name__)
def test_scalars_calculate_with_scalars_and_numbers(platform: Platform, kit: Kit, operation) -> None:
    a, b = scalar(platform, 7.0), scalar(platform, 2.0)
    for left, right in ((a, b), (a, 2.0), (7.0, b), (a, 2), (7, b)):
        assert number(platform, operation(left, right)) == pytest.approx(operation(7.0, 2.0))


def test_scalars_compare(platform: Platform, kit: Kit) -> None:
    a, b, nan = scalar(platform, 7.0), scalar(platform, 2.0), scalar(platform, math.nan)
    for condition, expected in (
        (a > b, True),
        (a < b, False),
        (a > 7, False),
        (b >= 2, True),
        (nan > b, False),
    ):
        assert bool(condition) is expected
    assert bool(nan != nan)
    assert not bool(a != a)


def test_a_power_of_a_scalar_has_the_digits_of_the_widest_float(platform: Platform, kit: Kit) -> None:
    assert number(platform, scalar(platform, 2.0) ** (1 / 2)) == pytest.approx(2**0.5, rel=1e-7)


@pytest.mark.parametrize("condition", [True, False])
def test_where_takes_scalars_and_numbers_on_either_side(
    platform: Platform, kit: Kit, condition: bool
) -> None:
    a = scalar(platform, 1.0)
    test = a > 0 if condition else a < 0
    for true, false in itertools.product((3.0, scalar(platform, 3.0)), (4.0, scalar(platform, 4.0))):
        assert number(platform, platform.where(test, true, false)) == (3.0 if condition else 4.0)


def test_where_keeps_nan_out_of_the_other_branch(platform: Platform, kit: Kit) -> None:
    a = scalar(platform, 1.0)
    assert number(platform, platform.where(a > 0, a, math.nan)) == 1.0
    assert math.isnan(number(platform, platform.where(a > 0, math.nan, a)))


def test_cast_gives_a_0d_tensor_of_the_dtype(kit: Kit, platform: Platform) -> None:
    for dtype in kit.dtypes:
        like = kit.tensor([1.0], dtype)
        for source in (scalar(platform, 1 / 3), 1 / 3):
            result = platform.cast(source, kit.dtype_object(dtype), like)
            assert tuple(result.shape) == ()
            assert kit.dtype(result) == dtype
            assert kit.array(result) == pytest.approx(float(rounded(1 / 3, dtype)), rel=1e-7)


def test_cast_without_a_dtype_means_float32(kit: Kit, platform: Platform) -> None:
    for like in (None, kit.tensor([1.0], "float16")):
        for source in (scalar(platform, 1e30), 1e30):
            result = platform.cast(source, None, like)
            assert kit.dtype(result) == "float32"
            assert kit.array(result) == pytest.approx(1e30, rel=1e-6)


def test_promoted_dtype_is_that_of_arithmetic(kit: Kit, platform: Platform) -> None:
    for a, b in itertools.product(kit.dtypes, repeat=2):
        tensors = [kit.tensor([1.0], a), kit.tensor([1.0], b)]
        if {a, b} == {"float16", "bfloat16"}:
            expected = "float32"
        else:
            expected = max(a, b, key=lambda dtype: (int(dtype.lstrip("bfloat")), dtype == a))
        assert platform.promoted_dtype(tensors) == kit.dtype_object(expected), (a, b)


# ---- scaling

FACTORS = (1 / 3, 0.1, 2**-10, 0.0, 1e-3)


def scaled_once(values: np.ndarray, factor: float, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The product rounded to ``dtype`` directly, and by way of float32."""
    exact = values * float(np.float32(factor))
    if dtype == "float64":
        return exact, exact
    return rounded(exact, dtype), rounded(rounded(exact, "float32"), dtype)


def assert_scaled_once(result: np.ndarray, values: np.ndarray, factor: float, dtype: str) -> None:
    direct, by_float32 = scaled_once(values, factor, dtype)
    assert ((result == direct) | (result == by_float32)).all()


def coefficient(kit: Kit, value: float):
    return get_platform().cast(value, None, kit.tensor([1.0]))


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("factor", FACTORS)
def test_scale_multiplies_the_original_by_the_unrounded_float32(
    kit: Kit, platform: Platform, factor: float, foreach: bool | None
) -> None:
    for dtype in kit.dtypes:
        parts = [rounded(random(500), dtype), rounded(random(3, 4), dtype), rounded(random(), dtype)]
        tensors = [kit.tensor(part, dtype) for part in parts]
        platform.scale_(tensors, coefficient(kit, factor), foreach)
        for tensor, part in zip(tensors, parts, strict=True):
            assert_scaled_once(kit.array(tensor), part, factor, dtype)
            assert kit.dtype(tensor) == dtype
            assert tuple(tensor.shape) == part.shape


def test_the_values_tell_a_rounded_factor_from_an_unrounded_one(kit: Kit) -> None:
    for dtype in set(kit.dtypes) & {"float16", "bfloat16"}:
        values = rounded(random(500), dtype)
        early = rounded(values * float(rounded(1 / 3, dtype)), dtype)
        direct, by_float32 = scaled_once(values, 1 / 3, dtype)
        assert ((early != direct) & (early != by_float32)).any()


def test_scale_handles_several_dtypes_in_one_call(kit: Kit, platform: Platform) -> None:
    parts = {dtype: rounded(random(20), dtype) for dtype in kit.dtypes}
    tensors = {dtype: kit.tensor(part, dtype) for dtype, part in parts.items()}
    platform.scale_(list(tensors.values()), coefficient(kit, 0.1), None)
    for dtype, part in parts.items():
        assert_scaled_once(kit.array(tensors[dtype]), part, 0.1, dtype)
        assert kit.dtype(tensors[dtype]) == dtype


@pytest.mark.parametrize("foreach", [None, False])
def test_a_tensor_given_twice_is_scaled_once(kit: Kit, platform: Platform, foreach: bool | None) -> None:
    first, second = kit.tensor([2.0, 4.0]), kit.tensor([8.0])
    platform.scale_([first, second, first, first], coefficient(kit, 0.5), foreach)
    assert kit.array(first).tolist() == [1.0, 2.0]
    assert kit.array(second).tolist() == [4.0]


def test_scale_of_a_transposed_view_reaches_the_memory_behind_it(kit: Kit, platform: Platform) -> None:
    values = rounded(random(3, 4), "float32")
    tensor = kit.transposed(kit.tensor(values))
    platform.scale_([tensor], coefficient(kit, 0.5), None)
    assert (kit.array(tensor) == values.T * 0.5).all()


def test_scale_of_empty_tensors(kit: Kit, platform: Platform) -> None:
    tensors = [kit.tensor(np.zeros((0, 3))), kit.tensor([2.0]), kit.tensor(np.zeros(0))]
    platform.scale_(tensors, coefficient(kit, 0.5), None)
    assert kit.array(tensors[1]).tolist() == [1.0]
    assert tuple(tensors[0].shape) == (0, 3)


def test_scale_by_nan_gives_nan(kit: Kit, platform: Platform) -> None:
    tensor = kit.tensor([1.0, 0.0])
    platform.scale_([tensor], coefficient(kit, math.nan), None)
    assert np.isnan(kit.array(tensor)).all()


@pytest.mark.parametrize("factor", FACTORS)
def test_scaled_gives_new_tensors_and_leaves_the_originals(
    kit: Kit, platform: Platform, factor: float
) -> None:
    for dtype in kit.dtypes:
        parts = [rounded(random(100), dtype), rounded(random(), dtype), np.zeros((0, 2))]
        tensors = [kit.tensor(part, dtype) for part in parts]
        results = platform.scaled(tensors, coefficient(kit, factor))
        for result, tensor, part in zip(results, tensors, parts, strict=True):
            assert kit.dtype(result) == dtype
            assert tuple(result.shape) == part.shape
            assert_scaled_once(kit.array(result), part, factor, dtype)
            assert (kit.array(tensor) == part).all()


# ---- counting


@pytest.mark.parametrize(
    ("values", "count"),
    [([1.0, 2.0], 0), ([math.nan, 1.0, math.inf, -math.inf], 3), ([], 0), ([[math.nan] * 3] * 5, 15)],
)
def test_nonfinite_count(kit: Kit, platform: Platform, values: list, count: int) -> None:
    for dtype in kit.dtypes:
        assert platform.nonfinite_count(kit.tensor(values, dtype)) == count


def test_nonfinite_count_of_a_0d_tensor(kit: Kit, platform: Platform) -> None:
    assert platform.nonfinite_count(kit.tensor(math.inf)) == 1

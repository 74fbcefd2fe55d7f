"""The accuracy of norms and of clipping on torch, against NumPy float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hyper_parallel
from hyper_parallel import NormKind, get_platform
from tests.torch_backend.oracle import ROUNDING, assert_scaled, factor, graded, norm_of, wide

pytestmark = pytest.mark.timeout(120)
INF = math.inf
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ORDERS = (2.0, 1.0, 3.0, 0.5, INF, -INF, 0.0)


def unrounded(gradients: list[torch.Tensor], p: float) -> float:
    """The norm before it is rounded to the gradients' dtype."""
    kind = NormKind(p)
    return float(kind.root(get_platform().statistic(gradients, kind, None)))


def random(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- the norm


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [1, 127, 128, 129, 4097, 300_001])
def test_norm_is_that_of_float64(size: int, dtype: torch.dtype, p: float) -> None:
    gradient = random(size, dtype)
    assert unrounded([gradient], p) == pytest.approx(norm_of([wide(gradient)], p), rel=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_norm_of_ten_million_elements(dtype: torch.dtype) -> None:
    gradient = random(10_000_000, dtype)
    values = gradient.float().numpy().astype(np.float64)
    for p in (2.0, 1.0, 3.0, INF):
        assert unrounded([gradient], p) == pytest.approx(norm_of([values], p), rel=1e-6), p


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("size", [10, 1000, 20_000])
def test_norm_of_many_tensors(size: int, p: float) -> None:
    """Small tensors take another way than large ones, and several dtypes mix."""
    gradients = [random(size, FLOATS[seed % 3], seed) for seed in range(60)]
    assert unrounded(gradients, p) == pytest.approx(norm_of(map(wide, gradients), p), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1000, 4095, 5000, 300_000])
@pytest.mark.parametrize("period", [64, 128, 4096])
@pytest.mark.parametrize("rest", [2**-12.01, 2**-12.2, 2**-12.5, 1e-4])
def test_small_elements_beside_large_ones_are_not_lost(
    rest: float, period: int, size: int, dtype: torch.dtype
) -> None:
    """Each small square alone is below half a unit in the last place of the sum that holds the large one."""
    gradient = torch.full((size,), rest, dtype=dtype)
    gradient[::period] = 1.0
    assert unrounded([gradient], 2.0) == pytest.approx(norm_of([wide(gradient)], 2.0), rel=1e-6)


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, 0.5, INF, -INF])
@pytest.mark.parametrize("value", [1e20, 1e-25, 1e-38])
@pytest.mark.parametrize("size", [3, 5000, 200_000])
def test_elements_whose_powers_leave_float32(size: int, value: float, p: float) -> None:
    gradient = torch.full((size,), value)
    expected = norm_of([wide(gradient)], p)
    if expected < 3e38:
        assert unrounded([gradient], p) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0])
@pytest.mark.parametrize(
    "values", [(1e20, 1e-20), (1e-20, 1e20, 1.0), (1e-25, 1e-22), (1e18, 1e20, 3e-20)], ids=str
)
@pytest.mark.parametrize("size", [1, 100, 50_000])
def test_huge_and_tiny_tensors_in_one_call(size: int, values: tuple[float, ...], p: float) -> None:
    gradients = [torch.full((size,), value) for value in values]
    assert unrounded(gradients, p) == pytest.approx(norm_of(map(wide, gradients), p), rel=1e-6)


def test_huge_and_tiny_blocks_of_one_tensor() -> None:
    gradient = torch.cat([torch.full((4096,), value) for value in (1e-20, 1e20, 1.0, 1e-30, 1e19)])
    assert unrounded([gradient], 2.0) == pytest.approx(norm_of([wide(gradient)], 2.0), rel=1e-6)


# ---- clipping


@pytest.mark.parametrize(("value", "max_norm"), [(1e20, 1.0), (1e20, 1e19), (1e-25, 1.0), (1e-25, 1e-26)])
def test_clipping_elements_whose_squares_leave_float32(value: float, max_norm: float) -> None:
    parameter = graded(torch.full((1000,), value))
    before = wide(parameter.grad)
    norm = hyper_parallel.clip_grad_norm_([parameter], max_norm)
    assert norm.item() == pytest.approx(norm_of([before], 2.0), rel=1e-6)
    assert_scaled([parameter.grad], [before], factor(norm_of([before], 2.0), max_norm))


def test_clipping_float16_beyond_its_largest_number() -> None:
    """The norm, 1.9e6, has no float16; the coefficient does not care, and beside float32 the norm is told too."""
    alone, beside = (graded(torch.full((1000,), 60_000.0, dtype=torch.float16)) for _ in range(2))
    before = wide(alone.grad)
    expected = norm_of([before], 2.0)
    assert hyper_parallel.clip_grad_norm_([alone], 1000.0).dtype == torch.float16
    norm = hyper_parallel.clip_grad_norm_([beside, graded(torch.zeros(1))], 1000.0)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert_scaled([alone.grad, beside.grad], [before] * 2, factor(expected, 1000.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("max_norm", [1.0, 3.3, 0.07])
def test_narrow_gradients_are_rounded_once(dtype: torch.dtype, max_norm: float) -> None:
    parameter = graded(random(20_000, dtype))
    before = wide(parameter.grad)
    hyper_parallel.clip_grad_norm_([parameter], max_norm)
    exact = before * factor(norm_of([before], 2.0), max_norm)
    # Half a unit in the last place is the rounding; 2e-7 is what the float32 coefficient may add to it.
    half = 2.0 ** np.floor(np.log2(np.abs(exact))) * ROUNDING[dtype]
    error = np.abs(wide(parameter.grad) - exact)
    normal = np.abs(exact) > torch.finfo(dtype).smallest_normal
    assert (error[normal] <= half[normal] * (1 + 1e-2)).all()
    assert len(set(np.unique(error[normal] / half[normal]))) > 10


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    scale=st.integers(-20, 19),
    max_norm=st.floats(1e-20, 1e20),
    p=st.sampled_from([2.0, 1.0, 3.0, INF]),
)
def test_norm_after_clipping_is_at_most_max_norm(
    seed: int, sizes: list[int], scale: int, max_norm: float, p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(size, generator=generator) * 10.0**scale for size in sizes]
    parameters = [graded(gradient) for gradient in gradients]
    before = norm_of(map(wide, gradients), p)
    hyper_parallel.clip_grad_norm_(parameters, max_norm, p)
    after = norm_of(map(wide, gradients), p)
    assert after <= max_norm * (1 + 1e-6)
    assert after == pytest.approx(before * factor(before, max_norm), rel=1e-6)


def test_clipping_again_changes_nothing_but_eps() -> None:
    parameter = graded(random(5000, torch.float32))
    for _ in range(3):
        hyper_parallel.clip_grad_norm_([parameter], 1.0)
    assert norm_of([wide(parameter.grad)], 2.0) == pytest.approx(1.0, rel=4e-6)

"""Gradients in a private format of torch_npu, whose views are copies and which foreach kernels refuse."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import hyper_parallel
from hyper_parallel import get_platform
from tests.torch_backend import simulated_npu
from tests.torch_backend.oracle import norm_of
from tests.torch_backend.simulated_npu import FRACTAL_NZ, Behaviour, private

pytestmark = pytest.mark.timeout(120)
ORDERS = (2.0, 1.0, 3.0, math.inf, -math.inf, 0.0)


@pytest.fixture(autouse=True, scope="module", params=["copies", "memory"])
def views(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a view of such a tensor is: whatever it is, the adapter must not take one."""
    with simulated_npu.present(), simulated_npu.behaving(Behaviour(private_views=request.param)):
        yield


def matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to("npu")


def graded(gradient: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(gradient.shape).to("npu"))
    parameter.grad = gradient
    return parameter


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def mixed() -> list[torch.Tensor]:
    """Padded and unpadded ones, two that share their memory as neighbours, and plain ones between them."""
    memory = torch.empty(2 * 16 * 32)
    neighbours = [private(matrix(16, 32, seed), part) for seed, part in enumerate(memory.split(16 * 32))]
    return [
        private(matrix(5, 7, 3)),
        matrix(4, 4, 4),
        *neighbours,
        private(matrix(20, 33, 5)),
        matrix(3, 2, 6),
    ]


# ---- what the adapter does


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("p", ORDERS)
def test_they_are_measured_and_scaled(p: float, foreach: bool | None) -> None:
    gradients = mixed()
    values, formats = [array(g) for g in gradients], [g.npu_format for g in gradients]
    parameters = [graded(gradient) for gradient in gradients]
    expected = norm_of(values, p)
    found = hyper_parallel.clip_grad_norm_(parameters, 0.5 * expected, p, foreach=foreach)
    assert float(found) == pytest.approx(expected, rel=1e-6)
    for gradient, before in zip(gradients, values, strict=True):
        np.testing.assert_allclose(array(gradient), before * (0.5 * expected / (expected + 1e-6)), rtol=1e-6)
    assert [gradient.npu_format for gradient in gradients] == formats


def test_one_that_comes_twice_is_scaled_once() -> None:
    gradient = private(matrix(5, 7))
    before = array(gradient)
    get_platform().scale_([gradient, gradient], torch.tensor(0.5).to("npu"), None)
    np.testing.assert_array_equal(array(gradient), before * 0.5)


@pytest.mark.parametrize("foreach", [None, False])
def test_a_16_bit_one_is_rounded_once(foreach: bool | None) -> None:
    gradient = private(matrix(40, 50).bfloat16())
    exact = torch.from_numpy(array(gradient) * float(np.float32(1 / 3)))
    get_platform().scale_([gradient], torch.tensor(1 / 3).to("npu"), foreach)
    np.testing.assert_array_equal(array(gradient), exact.float().bfloat16().double().numpy())


def test_they_are_clamped() -> None:
    gradients = mixed()
    values = [array(gradient) for gradient in gradients]
    hyper_parallel.clip_grad_value_([graded(gradient) for gradient in gradients], 0.25)
    for gradient, before in zip(gradients, values, strict=True):
        np.testing.assert_array_equal(array(gradient), np.clip(before, -0.25, 0.25))


def test_they_are_scaled_out_of_place() -> None:
    gradients = mixed()
    values = [array(gradient) for gradient in gradients]
    clipped, norm = hyper_parallel.clip_grads(gradients, 0.5)
    factor = 0.5 / (norm_of(values, 2) + 1e-6)
    assert float(norm) == pytest.approx(norm_of(values, 2), rel=1e-6)
    for gradient, result, before in zip(gradients, clipped, values, strict=True):
        np.testing.assert_allclose(array(result), before * factor, rtol=1e-6)
        np.testing.assert_array_equal(array(gradient), before)


def test_they_are_flattened_in_the_order_of_their_elements() -> None:
    gradient = private(matrix(5, 7))
    buffer = get_platform().flatten([(gradient, 3, 30)], 27, 0.0, gradient)
    np.testing.assert_array_equal(array(buffer), array(gradient).ravel()[3:30])


def test_the_checksum_is_that_of_the_same_values_in_the_plain_format() -> None:
    plain = matrix(5, 7)
    found = [get_platform().checksum(tensor) for tensor in (plain, private(plain), matrix(5, 7, 1))]
    assert float(found[0]) == float(found[1]) != float(found[2])


# ---- what the simulation does, so that the tests above can fail


def test_without_torch_npu_nobody_knows_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu")
    with pytest.raises(RuntimeError, match="_foreach_mul_ do not support internal format"):
        get_platform().scale_([private(matrix(5, 7))], torch.tensor(0.5).to("npu"), None)


def test_memory_is_neither_as_large_nor_in_the_order_of_the_elements() -> None:
    small, even = private(matrix(5, 7)), private(matrix(16, 32))
    assert small.untyped_storage().nbytes() == 16 * 16 * 4
    assert not np.array_equal(even.values().numpy(), array(even).ravel())
    assert np.array_equal(np.sort(even.values().numpy()), np.sort(array(even).ravel()))
    assert even.is_contiguous()


def test_what_is_written_to_a_view_is_lost() -> None:
    gradient = private(matrix(5, 7))
    before = array(gradient)
    with simulated_npu.behaving(Behaviour(private_views="copies")):
        for view in (gradient.view(-1), gradient[1:], gradient.as_strided((5,), (7,))):
            view.mul_(0)
    np.testing.assert_array_equal(array(gradient), before)
    gradient.mul_(2)
    np.testing.assert_array_equal(array(gradient), before * 2)


def test_a_view_shows_other_elements() -> None:
    gradient = private(matrix(5, 7))
    with simulated_npu.behaving(Behaviour(private_views="memory")):
        assert not np.array_equal(array(gradient.view(-1)), array(gradient).ravel())


def test_a_cast_to_the_plain_format_is_a_copy() -> None:
    torch_npu = sys.modules["torch_npu"]
    gradient = private(matrix(5, 7))
    plain = torch_npu.npu_format_cast(gradient, 2)
    assert [torch_npu.get_npu_format(tensor) for tensor in (gradient, plain)] == [FRACTAL_NZ, 2]
    np.testing.assert_array_equal(array(plain), array(gradient))
    assert torch_npu.npu_format_cast(plain, 2) is plain


@pytest.mark.parametrize("takes", [False, True])
def test_foreach_kernels_refuse_them_unless_told_otherwise(takes: bool) -> None:
    gradients = [private(matrix(5, 7)), matrix(2, 2)]
    values = [array(gradient) for gradient in gradients]
    with simulated_npu.behaving(Behaviour(foreach_takes_private=takes)):
        if not takes:
            with pytest.raises(RuntimeError, match="_foreach_norm do not support internal format"):
                torch._foreach_norm(gradients, 2.0)
        else:
            norms = [float(norm) for norm in torch._foreach_norm(gradients, 2.0)]
            assert norms == pytest.approx([norm_of([v], 2) for v in values], rel=1e-6)

"""The rules of devices, of which the code keeps the sources in ``devices``, on the simulated NPU in this process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hyper_parallel
from hyper_parallel import NormKind, get_platform
from hyper_parallel_torch import device_norms, devices
from tests.torch_backend import simulated_npu
from tests.torch_backend.oracle import norm_of, wide
from tests.torch_backend.simulated_npu import Behaviour

pytestmark = pytest.mark.timeout(120)
INF = math.inf
ORDERS = (2.0, 1.0, 3.0, 0.5, INF, -INF, 0.0)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    with simulated_npu.present():
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def graded(gradient: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype).to(gradient.device))
    parameter.grad = gradient
    return parameter


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def norm(gradients: list[torch.Tensor], p: float, foreach: bool | None = None) -> float:
    kind = NormKind(p)
    return float(kind.root(get_platform().statistic(gradients, kind, foreach)))


# ---- float64


@pytest.mark.parametrize(
    ("place", "widest"),
    [("cpu", torch.float64), ("cuda:1", torch.float64), ("npu:0", torch.float32), ("mps", torch.float32)],
)
def test_the_widest_float(place: str, widest: torch.dtype) -> None:
    assert devices.widest_float(torch.device(place)) == widest


@pytest.mark.parametrize("has_fp64", [True, False])
def test_an_xpu_is_asked_for_float64(has_fp64: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(has_fp64=has_fp64))
    found = devices.widest_float.__wrapped__(torch.device("xpu:0"))
    assert found == (torch.float64 if has_fp64 else torch.float32)


def test_numbers_of_the_host_are_no_wider_than_those_they_meet() -> None:
    assert devices.widest_float(CPU, ("cpu", "cuda")) == torch.float64
    assert devices.widest_float(CPU, ("npu",)) == torch.float32


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("float64", ["refused", "cast to float32"])
def test_scalars_are_float32_whatever_becomes_of_float64(float64: str, p: float) -> None:
    gradients = [random(300).to("npu"), random(20, 30, dtype=torch.bfloat16).to("npu")]
    values = [array(gradient) for gradient in gradients]
    with simulated_npu.behaving(Behaviour(float64=float64)):  # type: ignore[arg-type]
        parameters = [graded(gradient) for gradient in gradients]
        found = hyper_parallel.clip_grad_norm_(parameters, 0.5, p)
        assert found.dtype == torch.float32
        assert float(found) == pytest.approx(norm_of(values, p), rel=1e-6)


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An accelerator with float64, and the way of CUDA; the device is the simulated one all the same."""
    monkeypatch.setitem(devices._FLOAT64, "npu", lambda device: True)
    devices.widest_float.cache_clear()
    with simulated_npu.behaving(Behaviour(float64="computed")):
        yield
    devices.widest_float.cache_clear()


KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
UNLIKE: dict[str, list[torch.Tensor]] = {
    "several dtypes": [random(50, seed=i, dtype=dtype) for i, dtype in enumerate(KINDS)],
    "views": [random(30, 40).t(), random(40, 6)[:, ::2], random(40, 6, dtype=torch.bfloat16)[:, 1]],
    "a channels-last one": [random(2, 3, 4, 5).to(memory_format=torch.channels_last), random(6)[:4]],
    "neighbours": list(random(1000).split(333)),
    "empty and 0-d ones": [random(0, 3), random(), random(0)],
    "zeros": [-torch.zeros(5), torch.zeros(300)],
    "NaN": [random(5), torch.tensor([1.0, math.nan]).expand(200, 2).contiguous()],
}


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("p", [*ORDERS, 0.1, -1.0, 10.0])
@pytest.mark.parametrize("gradients", UNLIKE.values(), ids=UNLIKE.keys())
def test_an_accelerator_with_float64_combines_in_it(
    gradients: list[torch.Tensor], p: float, foreach: bool | None, float64: None
) -> None:
    values = [wide(gradient) for gradient in gradients]
    there = [gradient.to("npu") for gradient in gradients]
    with simulated_npu.recorded() as calls, np.errstate(all="ignore"):
        statistic = get_platform().statistic(there, NormKind(p), foreach)
        assert calls.waits == []
        assert ("aten::_foreach_norm" in calls.operators) == (p in (1, 2) and foreach is None)
        assert statistic.dtype == torch.float64
        expected = norm_of(values, p)
    assert NormKind(p).root(statistic).item() == pytest.approx(expected, rel=1e-6, abs=0, nan_ok=True)


@pytest.mark.parametrize("p", [3.0, 0.5, 0.1, -1.0, 30.0])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e20])
def test_with_float64_powers_and_roots_may_leave_float32(size: float, p: float, float64: None) -> None:
    if p == 30.0 and size != 1.0:
        size = 100.0
    gradient = torch.full((200_000,), size)
    assert norm([gradient.to("npu")], p) == pytest.approx(norm_of([array(gradient)], p), rel=1e-6)


# ---- the order of sums


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ten_million_elements(dtype: torch.dtype, p: float) -> None:
    gradient = random(10_000_000, dtype=dtype)
    values = gradient.float().numpy().astype(np.float64)
    assert norm([gradient.to("npu")], p) == pytest.approx(norm_of([values], p), rel=1e-6)


@pytest.mark.parametrize("rest", [2**-12.01, 1e-4])
@pytest.mark.parametrize("size", [1000, 300_000])
def test_small_elements_beside_large_ones_are_not_lost(size: int, rest: float) -> None:
    gradient = torch.full((size,), rest)
    gradient[::64] = 1.0
    values = gradient.double().numpy()
    assert norm([gradient.to("npu")], 2.0) == pytest.approx(norm_of([values], 2.0), rel=1e-6)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("p", ORDERS)
def test_tensors_in_pieces(p: float, foreach: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_norms, "_CHUNK", 300)
    monkeypatch.setattr(device_norms, "_SMALL", 100)
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    sizes = (1, 99, 128, 129, 300, 301, 1000, 5)
    gradients = [random(size, dtype=kinds[i % 3], seed=i).to("npu") for i, size in enumerate(sizes)]
    gradients.append(random(40, 6).to("npu")[:, ::2])
    values = [array(gradient) for gradient in gradients]
    assert norm(gradients, p, foreach) == pytest.approx(norm_of(values, p), rel=1e-6)


@pytest.mark.parametrize("distance", [1, 2, 3, 16, 55, 4096])
def test_the_checksum_sees_two_elements_change_places_far_into_a_tensor(distance: int) -> None:
    tensor = random(2**20)
    before = float(get_platform().checksum(tensor.to("npu")))
    for start in range(1_040_000, 1_040_016):
        swapped = tensor.clone()
        swapped[[start, start + distance]] = torch.tensor([3.0, -3.0])
        other = swapped.clone()
        other[[start, start + distance]] = torch.tensor([-3.0, 3.0])
        found = [float(get_platform().checksum(t.to("npu"))) for t in (swapped, other)]
        assert len({before, *found}) == 3, start


# ---- where numbers of the host are made


@pytest.mark.parametrize("elsewhere", ["npu", "meta"])
@pytest.mark.parametrize("place", ["cpu", "npu"])
def test_the_default_device_is_not_that_of_the_gradients(place: str, elsewhere: str) -> None:
    for p in ORDERS:
        parameters = [graded(random(300).to(place)), graded(random(0).to(place))]
        values = [array(parameter.grad) for parameter in parameters]
        devices._kept.cache_clear()
        with torch.device(elsewhere):
            found = hyper_parallel.clip_grad_norm_(parameters, 0.5, p)
            hyper_parallel.clip_grads_with_norm_(parameters, 0.5, 1.0)
            clipped, _ = hyper_parallel.clip_grads([parameter.grad for parameter in parameters], 0.1, p)
        assert found.device.type == clipped[0].device.type == place
        assert found.item() == pytest.approx(norm_of(values, p), rel=1e-6)


# ---- what the host waits for


def test_a_later_call_makes_the_host_wait_for_nothing() -> None:
    parameters = [graded(random(50).to("npu")), graded(random(3, 4, dtype=torch.bfloat16).to("npu"))]
    for p in ORDERS:
        hyper_parallel.clip_grad_norm_(parameters, 1e-3, p)
        with simulated_npu.recorded() as calls:
            hyper_parallel.clip_grad_norm_(parameters, 1e-4, p)
        assert (p, calls.waits) == (p, [])
        assert any("mul_" in operator for operator in calls.operators)


def test_numbers_are_copied_to_the_device_once() -> None:
    platform, like = get_platform(), torch.zeros(1).to("npu")
    values = [0.25, 7.0, math.nan, 0.0]
    platform.pack(values, like)
    with simulated_npu.recorded() as calls:
        first, second = (platform.pack(values, like) for _ in range(2))
        negative = platform.pack([*values[:3], -0.0], like)
    assert calls.waits == ["aten::copy_ from the host"]  # of the third, which is new
    second.mul_(0)
    np.testing.assert_array_equal(array(first), values)
    assert math.copysign(1, array(negative)[3]) == -1


def test_a_number_of_the_host_goes_along_with_a_kernel() -> None:
    platform, like, empty = get_platform(), torch.zeros(1).to("npu"), torch.zeros(0).to("npu")
    with simulated_npu.recorded() as calls:
        found = [
            platform.cast(3.0, torch.bfloat16, like),
            platform.cast(torch.tensor(3.0, dtype=torch.float64), None, like),
            platform.where(like[0] > 1, 2.0, torch.tensor(3.0, dtype=torch.float64)),
            platform.statistic([empty], NormKind(2), None) + 3.0,
        ]
    assert calls.waits == []
    assert [tensor.device for tensor in found] == [like.device] * 4
    assert [array(tensor).item() for tensor in found] == [3.0] * 4


# ---- several devices


def test_the_coefficient_of_new_gradients_is_copied_once_to_each_device() -> None:
    places = ["npu:0", "cpu", "npu:0", "cpu", "npu:3", "cpu"]
    gradients = [random(30, seed=i, dtype=torch.bfloat16).to(place) for i, place in enumerate(places)]
    coefficient = torch.tensor(1 / 3).to("npu:0")
    with simulated_npu.recorded() as calls:
        scaled = get_platform().scaled(gradients, coefficient)
    assert len(calls.waits) == 2
    for gradient, result in zip(gradients, scaled, strict=True):
        assert result.device == gradient.device
        assert torch.equal(result.cpu(), gradient.cpu() * torch.tensor(1 / 3))


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("first", ["npu:0", "npu:3", "cpu"])
def test_gradients_on_several_devices_of_one_process(first: str, p: float) -> None:
    places = [first, *({"npu:0", "npu:3", "cpu"} - {first})]
    parameters = [graded(random(30, seed=i).to(place)) for i, place in enumerate(places)]
    values = [array(parameter.grad) for parameter in parameters]
    found = hyper_parallel.clip_grad_norm_(parameters, 0.5, p)
    expected = norm_of(values, p)
    assert str(found.device) == first
    assert float(found) == pytest.approx(expected, rel=1e-6)
    for parameter, place, before in zip(parameters, places, values, strict=True):
        assert str(parameter.grad.device) == place
        np.testing.assert_allclose(array(parameter.grad), before * min(1, 0.5 / (expected + 1e-6)), rtol=1e-6)

"""The simulated NPU keeps torch_npu's rules: a test that passes on it says something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.torch_backend import simulated_npu
from tests.torch_backend.simulated_npu import Behaviour

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    with simulated_npu.present():
        yield


def test_a_tensor_says_where_it_is() -> None:
    for place, expected in (("npu", 0), ("npu:0", 0), ("npu:5", 5)):
        tensor = torch.ones(2).to(place)
        assert (tensor.device.type, tensor.device.index) == ("npu", expected)
        assert (tensor + 1).device == tensor.device
        assert torch.zeros(3, device=place).device == tensor.device


@pytest.mark.parametrize("other", ["cpu", "npu:1"])
def test_tensors_of_two_devices_do_not_mix(other: str) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2).to("npu:0") + torch.ones(2).to(other)


def test_operators_reach_the_memory_behind_a_view() -> None:
    tensor = torch.zeros(2, 3).to("npu")
    tensor.t()[1].fill_(5)
    tensor.view(-1)[5:].add_(1)
    assert tensor.tolist() == [[0, 5, 0], [0, 5, 1]]


def test_an_in_place_operator_returns_its_tensor_and_out_fills_it() -> None:
    tensor, out = torch.ones(2).to("npu"), torch.zeros(2).to("npu")
    assert tensor.mul_(2) is tensor
    assert torch.add(tensor, tensor, out=out) is out
    assert out.tolist() == [4, 4]


# ---- float64


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, dtype=torch.float64, device="npu"),
        lambda: torch.zeros(2, dtype=torch.float64).to("npu"),
        lambda: torch.zeros(2).to("npu") * torch.tensor(2.0, dtype=torch.float64).expand(1).to("npu"),
        lambda: torch.zeros(2).to("npu").double(),
        lambda: torch.zeros(2).to("npu").sum(dtype=torch.float64),
        lambda: torch.zeros(()).to("npu") + torch.zeros((), dtype=torch.float64),
    ],
)
def test_float64_is_refused(make) -> None:
    with pytest.raises(RuntimeError, match="no float64"):
        make()


def test_float64_becomes_float32_without_a_word_or_is_computed() -> None:
    tensor = torch.ones(2).to("npu")
    with simulated_npu.behaving(Behaviour(float64="cast to float32")):
        assert tensor.double().dtype == torch.float32
    with simulated_npu.behaving(Behaviour(float64="computed")):
        assert (tensor.double() / 3).tolist() == [1 / 3, 1 / 3]
    assert torch.ones(2).to("npu").cpu().double().dtype == torch.float64


@pytest.mark.parametrize("scalars", ["rounded", "in full"])
def test_a_0d_tensor_beside_16_bits(scalars: str) -> None:
    values, factor = torch.randn(500).bfloat16(), torch.tensor(1 / 3)
    tensor, there = values.to("npu"), factor.to("npu")
    with simulated_npu.behaving(Behaviour(scalars=scalars)):  # type: ignore[arg-type]
        found = [tensor * there, *torch._foreach_mul([tensor], there), tensor.clone().mul_(there)]
        in_place = tensor.clone()
        torch._foreach_mul_([in_place], there)
    expected = values * (factor.bfloat16() if scalars == "rounded" else factor)
    assert (values * factor.bfloat16() != values * factor).any()
    for result in (*found, in_place):
        assert torch.equal(result.cpu(), expected)
    assert torch.equal((tensor * there.view(1)).bfloat16().cpu(), values * factor)


# ---- what is recorded


@pytest.mark.parametrize(
    ("read", "waits"),
    [
        (lambda t: t[0].item(), True),
        (lambda t: t.tolist(), True),
        (lambda t: t.cpu(), True),
        (lambda t: bool((t > 0).all()), True),
        (lambda t: float(t.sum()), True),
        (lambda t: torch.empty(2).copy_(t), True),
        (lambda t: t.copy_(torch.ones(2)), True),
        (lambda t: t.copy_(torch.ones(2), non_blocking=True), True),  # not page-locked
        (lambda t: torch.tensor([1.0, 2.0], device="npu"), True),
        (lambda t: t.to("npu:1"), True),
        (lambda t: torch.npu.synchronize(), True),
        (lambda t: torch.full((2,), 3.0, device="npu"), False),
        (lambda t: t.mul_(2).sum().sqrt() > 1, False),
        (lambda t: torch.where(t > 0, 1.0, t), False),
        (lambda t: t.clone().copy_(t), False),
    ],
)
def test_what_the_host_waits_for(read, waits: bool) -> None:
    tensor = torch.ones(2).to("npu")
    with simulated_npu.recorded() as calls:
        read(tensor)
    assert bool(calls.waits) == waits, calls.waits


def test_operators_are_recorded_while_the_context_lasts() -> None:
    tensor = torch.ones(2).to("npu")
    with simulated_npu.recorded() as calls:
        torch._foreach_mul_([tensor], 2.0)
    tensor.add_(1)
    assert calls.operators == ["aten::_foreach_mul_"]


def test_torch_npu_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch_npu", sys.modules["torch_npu"])
    with simulated_npu.present():
        assert sys.modules["torch_npu"].get_npu_format(torch.ones(1).to("npu")) == 2
    assert "torch_npu" not in sys.modules

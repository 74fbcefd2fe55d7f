"""CPU offload: gradients and the process group are on different devices, and the packed numbers hop between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.parity.pool import RankFailure, RankPool

pytestmark = pytest.mark.timeout(180)
INF = math.inf
NORMS = [(2.0, 13.0), (1.0, 19.0), (INF, 12.0), (-INF, 3.0), (0.0, 3.0)]


def joined(store: Path, backend: str, devices: list[str]) -> Iterator[RankPool]:
    """Two ranks, whose only group serves ``devices``."""
    with RankPool("torch", 2) as pool:
        assert pool.run("tests.torch_backend.offloading:join", str(store), backend) == [devices] * 2
        yield pool


@pytest.fixture(scope="module")
def npu_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from joined(tmp_path_factory.mktemp("group") / "npu", "npu:hccl", ["npu"])


@pytest.fixture(scope="module")
def cpu_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from joined(tmp_path_factory.mktemp("group") / "cpu", "cpu:gloo", ["cpu"])


@pytest.fixture(scope="module")
def both_groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """One group with a backend for each kind of device, as ``init_process_group`` makes it for checkpoints."""
    yield from joined(tmp_path_factory.mktemp("group") / "both", "cpu:gloo,npu:hccl", ["cpu", "npu"])


def run(pool: RankPool, function: str, *args: Any) -> list[Any]:
    return pool.run(f"tests.torch_backend.offloading:{function}", *args)


def assert_clipped(found: Any, rank: int, norm: float, devices: tuple[str, str], first: str) -> None:
    """(3 or 4, 12) scaled, on ``devices``; the norm is on that of the first gradient."""
    assert found[0] == pytest.approx(norm, rel=1e-6)
    assert found[1] == first
    scale = min(1.0, 1.0 / (norm + 1e-6))
    assert [device for device, _ in found[2]] == list(devices)
    assert found[2][0][1] == pytest.approx([(3.0 + rank) * scale], rel=1e-6)
    assert found[2][1][1][-1:] == pytest.approx([12.0 * scale], rel=1e-6)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize(("p", "norm"), NORMS)
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_a_group_that_serves_the_npu_alone(
    device: str, p: float, norm: float, foreach: bool | None, npu_group: RankPool
) -> None:
    for rank, found in enumerate(run(npu_group, "plain", device, "npu", p, foreach)):
        assert_clipped(found, rank, norm, (device, device), device)


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_a_group_that_serves_the_cpu_alone(device: str, cpu_group: RankPool) -> None:
    for rank, found in enumerate(run(cpu_group, "plain", device, "cpu", 2.0, None)):
        assert_clipped(found, rank, 13.0, (device, device), device)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize(("p", "norm"), NORMS)
@pytest.mark.parametrize("first", ["cpu", "npu"])
def test_gradients_on_both_devices(
    first: str, p: float, norm: float, foreach: bool | None, npu_group: RankPool
) -> None:
    other = {"cpu": "npu", "npu": "cpu"}[first]
    for rank, found in enumerate(run(npu_group, "both_devices", first, "npu", p, foreach)):
        assert_clipped(found, rank, norm, (first, other), first)


@pytest.mark.parametrize(
    ("p", "norm"),
    [(2.0, math.sqrt(25 + 288)), (1.0, 31.0), (3.0, (91 + 2 * 1728) ** (1 / 3)), (INF, 12.0), (-INF, 0.0)],
)
@pytest.mark.parametrize("first", ["cpu", "npu"])
def test_one_statistic_over_both_devices(first: str, p: float, norm: float, npu_group: RankPool) -> None:
    other = {"cpu": "npu", "npu": "cpu"}[first]
    for rank, found in enumerate(run(npu_group, "one_term_on_both_devices", first, p)):
        assert_clipped(found, rank, norm, (first, other), first)


def test_dtensors_of_the_device(npu_group: RankPool) -> None:
    for rank, found in enumerate(run(npu_group, "dtensor")):
        assert_clipped(found, rank, 13.0, ("npu", "npu"), "npu")


@pytest.mark.parametrize(("p", "norm"), [(2.0, math.sqrt(13)), (1.0, 5.0), (INF, 3.0), (-INF, 2.0)])
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_partial_gradients_hop_in_buckets(device: str, p: float, norm: float, npu_group: RankPool) -> None:
    for found in run(npu_group, "partial", device, p):
        assert found[:2] == (pytest.approx(norm, rel=1e-6), device)


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_a_rank_without_gradients_still_finds_the_group(device: str, npu_group: RankPool) -> None:
    assert run(npu_group, "missing_on_one_rank", device) == [5.0, 5.0]


@pytest.mark.parametrize(("p", "norm"), [(2.0, 5.0), (1.0, 7.0), (INF, 4.0)])
@pytest.mark.parametrize("devices", [("npu",), ("cpu",)])
def test_a_stage_without_parameters_meets_the_others_in_one_backend(
    devices: tuple[str, ...], p: float, norm: float, both_groups: RankPool
) -> None:
    found = run(both_groups, "stages", devices, p)
    assert [rank[0] for rank in found] == [pytest.approx(norm, rel=1e-6)] * 2
    assert [[device for device, _ in rank[2]] for rank in found] == [list(devices), []]


@pytest.mark.parametrize("devices", [("npu", "cpu"), ("cpu", "npu"), ("cpu", "cpu"), ("npu", "npu")])
def test_stages_on_different_devices_meet_in_one_backend(
    devices: tuple[str, ...], both_groups: RankPool
) -> None:
    for rank, found in enumerate(run(both_groups, "stages", devices, 2.0)):
        assert found[:2] == (pytest.approx(50**0.5, rel=1e-6), devices[rank])


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_a_group_with_a_backend_for_each(device: str, both_groups: RankPool) -> None:
    for rank, found in enumerate(run(both_groups, "plain", device, "npu", 2.0, None)):
        assert_clipped(found, rank, 13.0, (device, device), device)
    for norm, place in (found[:2] for found in run(both_groups, "partial", device, 1.0)):
        assert (norm, place) == (pytest.approx(5.0, rel=1e-6), device)


def test_the_simulated_group_refuses_tensors_of_the_cpu(tmp_path: Path) -> None:
    with RankPool("torch", 2) as pool:
        pool.run("tests.torch_backend.offloading:join", str(tmp_path / "store"), "npu:hccl")
        with pytest.raises(RankFailure, match="No backend type associated with device type cpu"):
            pool.run("torch.distributed:all_reduce", __import__("torch").ones(1))

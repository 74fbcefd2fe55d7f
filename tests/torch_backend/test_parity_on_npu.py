"""The parity cases on ranks whose tensors are on the simulated NPU, against the float64 oracle."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hyper_parallel.parity.cases import Case, build_cases
from hyper_parallel.parity.suite import run_on
from tests.torch_backend.simulated_npu import HCCL_REDUCES_ON_910, Behaviour

if TYPE_CHECKING:
    from tests.torch_backend.conftest import NpuRanks

pytestmark = pytest.mark.timeout(180)

STRICT = Behaviour(float64="refused", average="refused", reduced=frozenset({torch.float32}))
ATLAS_910 = Behaviour(float64="cast to float32", average="refused", reduced=HCCL_REDUCES_ON_910)


def label(case: Case) -> str:
    """What varies within one kind of parallelism: the dtype, or which gradients are missing."""
    return case.name.split(", ")[1]


LABELS = ("float32", "mixed dtypes", "one missing on one rank")
CASES = [*build_cases(1), *build_cases(2), *(case for case in build_cases(4) if label(case) in LABELS)]
FEW = [case for case in build_cases(2) if label(case) in ("mixed dtypes", "others missing on each rank")]


def by_name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_equals_the_oracle(case: Case, npu_ranks: NpuRanks) -> None:
    assert run_on(npu_ranks.get(case.world_size), case, "npu").failures == ()


@pytest.mark.parametrize("case", FEW, ids=by_name)
@pytest.mark.parametrize("behaviour", [STRICT, ATLAS_910], ids=["strict", "910"])
def test_equals_the_oracle_whatever_the_device_refuses(
    behaviour: Behaviour, case: Case, npu_ranks: NpuRanks
) -> None:
    assert run_on(npu_ranks.get(case.world_size, behaviour), case, "npu").failures == ()


def run(ranks: NpuRanks, function: str, *args: Any, behaviour: Behaviour | None = None) -> list[Any]:
    return ranks.get(2, behaviour).run(f"tests.torch_backend.on_npu:{function}", *args)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("p", [2.0, 1.0, math.inf, -math.inf])
def test_nan_on_one_rank_reaches_every_rank(p: float, keeps: bool, npu_ranks: NpuRanks) -> None:
    behaviour = Behaviour(maximum_keeps_nan=keeps)
    for norm, gradient in run(npu_ranks, "clip_nan_of_rank_1", p, behaviour=behaviour):
        assert math.isnan(norm)
        assert all(map(math.isnan, gradient))


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min"])
def test_collectives_are_sums_and_maxima_of_float32(reduce_op: str, npu_ranks: NpuRanks) -> None:
    """HCCL has no AVG and no float64; minima of values are allowed, as values of Partial gradients are float32."""
    for calls in run(npu_ranks, "collectives_of_a_partial", reduce_op):
        reduced = [call for call in calls if call.reduce_op]
        assert {call.dtype for call in reduced} == {"float32"}
        assert {call.reduce_op for call in reduced} == {"max", "sum", *({reduce_op} - {"avg"})}


@pytest.mark.parametrize("refused", [torch.float64, torch.uint8, torch.bool])
def test_the_simulated_hccl_refuses_dtypes(refused: torch.dtype, npu_ranks: NpuRanks) -> None:
    for message in run(npu_ranks, "all_reduce_error", refused, behaviour=Behaviour(float64="computed")):
        assert f"HCCL AllReduce: Unsupported data type {refused}" in message


def test_the_simulated_hccl_averages_or_refuses_and_drops_nan(npu_ranks: NpuRanks) -> None:
    assert run(npu_ranks, "reductions") == [{"avg": 1.5, "max": 1.0, "min": 1.0}] * 2
    refusing = Behaviour(average="refused", maximum_keeps_nan=True)
    for found in run(npu_ranks, "reductions", behaviour=refusing):
        assert "Cannot use ReduceOp.AVG" in found["avg"]
        assert math.isnan(found["max"])

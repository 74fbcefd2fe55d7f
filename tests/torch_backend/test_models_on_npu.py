"""Models that torch's own APIs shard, on the simulated NPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.torch_backend import models, on_npu
from tests.torch_backend.oracle import norm_of

if TYPE_CHECKING:
    from tests.torch_backend.conftest import NpuRanks

pytestmark = pytest.mark.timeout(180)
WORLDS = [("fsdp", 1), ("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("tp", 2), ("tp+fsdp", 4)]
NORM_TYPES = (2.0, 1.0, 3.0, math.inf, 0.0)


def run(ranks: NpuRanks, world_size: int, function: str, *args: Any) -> list[Any]:
    return ranks.get(world_size).run(f"tests.torch_backend.on_npu:{function}", *args, timeout=100)


@pytest.mark.parametrize(("strategy", "world_size"), WORLDS)
def test_norm_and_gradients_are_those_of_one_process(
    strategy: str, world_size: int, npu_ranks: NpuRanks
) -> None:
    whole = models.reference_gradients()
    ranks = run(npu_ranks, world_size, "clip_model", strategy, NORM_TYPES, 1.0)
    for index, p in enumerate(NORM_TYPES):
        assert len({results[index]["norm"] for results in ranks}) == 1, f"p={p}: the ranks disagree"
        for rank, found in enumerate(results[index] for results in ranks):
            # Sharded forward and backward passes round in another order than one process.
            assert found["norm"] == pytest.approx(norm_of(whole, p), rel=1e-5), f"p={p}, rank {rank}"
            assert found["in place"], f"p={p}, rank {rank}"
            factor = min(1.0, 1.0 / (found["norm"] + 1e-6))
            for clipped, gradient in zip(found["gradients"], whole, strict=True):
                np.testing.assert_allclose(clipped, gradient * factor, rtol=1e-4, atol=1e-5 * factor)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, math.inf, -math.inf, 0.0])
def test_the_host_waits_for_nothing_where_all_is_sharded(
    p: float, foreach: bool | None, npu_ranks: NpuRanks
) -> None:
    for waits, collectives in run(npu_ranks, 2, "calls_of_a_later_step", "fsdp", p, foreach):
        assert waits == []
        assert [(call.name, call.dtype, call.ranks) for call in collectives] == [
            ("AllReduce", "float32", (0, 1))
        ]


@pytest.mark.parametrize("missing", [[], [1, 4]], ids=["all there", "some missing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", on_npu.CALLS)
def test_the_host_waits_where_something_is_planned_anew(
    call: str, dtype: torch.dtype, missing: list[int], npu_ranks: NpuRanks
) -> None:
    """In the first step of its kind and not where gradients are missing; ``get_total_norm`` is given new tensors."""
    planned = {"get_total_norm": {0, 1, 2, 3}, "clip_grads": {0}}
    for waits in run(npu_ranks, 2, "waits_of_steps", call, dtype, missing):
        assert {step for step, found in enumerate(waits) if found} == planned.get(call, set())


@pytest.mark.parametrize("strategy", ["hsdp", "tp"])
def test_the_host_reads_one_buffer_where_something_is_replicated(strategy: str, npu_ranks: NpuRanks) -> None:
    for waits, collectives in run(npu_ranks, 2, "calls_of_a_later_step", strategy, 2.0, None):
        assert waits == ["tolist"]
        assert len(collectives) == 1

"""The platform for NPUs on real ranks, with NPUs simulated and HCCL's work done by MCCL."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hyper_parallel.parity.cases import Case, build_cases
from hyper_parallel.parity.checks import judge
from hyper_parallel.parity.suite import CASE_TIMEOUT
from tests.mindspore_backend.oracle import rounded

if TYPE_CHECKING:
    from tests.conftest import Pools

pytestmark = pytest.mark.timeout(180)

SELECTED = {
    2: ("float32", "mixed dtypes", "others missing on each rank", "one missing everywhere", "none at all"),
    3: ("mixed dtypes", "others missing on each rank"),
    4: ("float32", "mixed dtypes"),
}
CASES = [
    case
    for world_size, labels in SELECTED.items()
    for case in build_cases(world_size)
    if any(f", {label}, " in case.name for label in labels)
]


def on_ranks(pools: Pools, world_size: int, name: str, *args: object) -> list[Any]:
    target = f"tests.mindspore_backend.ascend_ranks:{name}"
    return pools.get("mindspore", world_size).run(target, *args, timeout=CASE_TIMEOUT, label=str(args[0]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parity(pools: Pools, case: Case) -> None:
    found = on_ranks(pools, case.world_size, "run_case", case)
    assert judge(case, [outcomes for outcomes, _ in found]).failures == ()
    for _, calls in found:
        assert {(dtype, reduce_op) for _, dtype, reduce_op in calls} <= {
            ("Float32", reduce_op) for reduce_op in ("sum", "max", "min")
        }


def test_a_graph_beside_the_platform_for_npus(pools: Pools) -> None:
    (case,) = [case for case in CASES if case.name == "tp+fsdp, mixed dtypes, 4 ranks"]
    assert judge(case, on_ranks(pools, 4, "run_in_a_graph", case)).failures == ()


@pytest.mark.parametrize("kind", ["shard", "copy"])
@pytest.mark.parametrize("p", [2.0, 0.5, 0.0, math.inf, -math.inf])
def test_one_collective_and_no_wait_from_the_second_step_on(pools: Pools, p: float, kind: str) -> None:
    """With copies the host waits for a sum, to learn whether a gradient is missing on some of them."""
    waits = int(kind == "copy" and not math.isinf(p))
    for taken, _, gradient in on_ranks(pools, 2, "steps", kind, p, 3):
        assert [calls for _, calls in taken] == [
            [("all_reduce", "Float32", "max" if math.isinf(p) else "sum")]
        ] * 3
        assert [number for number, _ in taken] == [1, waits, waits]
        assert gradient is not None
        assert (gradient < 1).all()  # the tensor that was passed, scaled in place


def test_partial_gradients_are_reduced_by_a_reduce_scatter(pools: Pools) -> None:
    for rank, (taken, norm, gradient) in enumerate(on_ranks(pools, 2, "steps", "terms", 2.0, 2)):
        names = [name for name, _, _ in taken[-1][1]]
        assert names == ["all_reduce", "all_reduce", "reduce_scatter", "all_reduce"]
        assert norm == pytest.approx(3 * math.sqrt(6), rel=1e-6)
        assert gradient == pytest.approx(np.full((2, 3), (1 + rank) * 0.5 / norm), rel=1e-5)


@pytest.mark.parametrize("kind", ["shard", "copy"])
@pytest.mark.parametrize("p", [2.0, math.inf, -math.inf])
def test_nan_reaches_every_rank(pools: Pools, p: float, kind: str) -> None:
    assert all(map(math.isnan, on_ranks(pools, 3, "nan_on_the_last_rank", kind, p)))


@pytest.mark.parametrize("oldest", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_full_tensors_travel_in_integers_that_every_npu_adds(pools: Pools, dtype: str, oldest: bool) -> None:
    values = rounded(np.random.default_rng(0).standard_normal((5, 3)), dtype)
    for found in on_ranks(pools, 4, "full_tensors", values, dtype, oldest):
        for full in found:
            np.testing.assert_array_equal(full, values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_of_any_dtype_on_the_oldest_npu(pools: Pools, dtype: str) -> None:
    """Terms 2 + 2 of four elements, four copies of 2 on each rank, eight shards' elements of 2."""
    expected = math.sqrt(4 * 16 + 4 * 4 + 8 * 4)
    for norm, gradients, calls in on_ranks(pools, 2, "clip_on_the_oldest", dtype):
        assert norm == pytest.approx(float(rounded(expected, dtype)), rel=1e-6)
        for gradient in gradients:
            np.testing.assert_allclose(gradient, np.full(4, 2 / expected), rtol=2.0**-7)
        assert {dtype for _, dtype, _ in calls} == {"Float32"}

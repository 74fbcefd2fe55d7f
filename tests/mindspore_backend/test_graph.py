"""Clipping in compiled graphs on real ranks with MCCL, against the oracle and ``clip_grads``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hyper_parallel import Partial, Replicate, Shard
from hyper_parallel.parity.cases import NORM_TYPES, Case, build_cases
from hyper_parallel.parity.checks import judge
from tests.mindspore_backend.graph_ranks import FORMS
from tests.mindspore_backend.oracle import norm

if TYPE_CHECKING:
    from tests.conftest import Pools

pytestmark = pytest.mark.timeout(300)


def reducible(case: Case) -> Case:
    """The case without the Partial gradients that a graph cannot reduce."""
    kept = [
        spec
        for spec in case.tensors
        if not any(isinstance(p, Partial) and p.reduce_op in ("max", "min") for p in spec.placements)
    ]
    return replace(case, tensors=tuple(kept))


CASES = {
    case.name: reducible(case)
    for world_size in (2, 3, 4)
    for case in build_cases(world_size)
    if ", mixed dtypes, " in case.name
    and (
        world_size == 2
        or case.parallelism in ("partial+shard", "tp+fsdp", "pipeline", "pipeline+fsdp", "experts")
    )
}
MODEL = "fsdp+plain, float32, {} ranks"


def on_ranks(pools: Pools, world_size: int, name: str, *args: object) -> list[Any]:
    target = f"tests.mindspore_backend.graph_ranks:{name}"
    return pools.get("mindspore", world_size).run(target, *args, timeout=200, label=str(args))


def check(case: Case, found: list[Any]) -> None:
    assert judge(case, found).failures == ()
    for outcomes in found:
        eager = {outcome.norm_type: outcome for outcome in outcomes if outcome.form == "functional"}
        for outcome in outcomes:
            assert outcome.norm == pytest.approx(eager[outcome.norm_type].norm, rel=1e-6, abs=0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parity_in_a_compiled_function(pools: Pools, case: Case) -> None:
    check(case, on_ranks(pools, case.world_size, "run_case", case, ("jit",), (2.0,)))


@pytest.mark.parametrize(("world_size", "orders"), [(1, (2.0, math.inf)), (2, NORM_TYPES)])
def test_all_orders_in_all_forms(pools: Pools, world_size: int, orders: Sequence[float]) -> None:
    name = MODEL.format(world_size)
    (case,) = [case for case in build_cases(world_size) if case.name == name]
    check(case, on_ranks(pools, world_size, "run_case", case, FORMS, orders))


@pytest.mark.parametrize("parallelism", ["partial+shard", "pipeline+fsdp"])
@pytest.mark.parametrize("p", [0.0, math.inf, -math.inf])
def test_other_orders_of_partial_gradients_and_stages(pools: Pools, parallelism: str, p: float) -> None:
    case = CASES[f"{parallelism}, mixed dtypes, 4 ranks"]
    check(case, on_ranks(pools, 4, "run_case", case, ("jit",), (p,)))


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("p", [2.0, math.inf, -math.inf])
def test_nan_reaches_every_rank_and_every_element(pools: Pools, p: float, placement: Any) -> None:
    for total, gradient in on_ranks(pools, 3, "nonfinite", math.nan, p, placement, "jit"):
        assert math.isnan(total)
        assert all(map(math.isnan, gradient))


@pytest.mark.parametrize(
    ("sizes", "reduce_ops", "bucket", "p"),
    [
        ((1,), ("sum",), 100, 2.0),  # nothing for most ranks to count
        ((0, 2), ("avg",), 100, -math.inf),
        ((5, 1, 8), ("sum", "avg"), 3, 2.0),
        ((7, 9), ("avg",), 4, math.inf),
    ],
)
def test_partial_gradients_in_buckets(
    pools: Pools, sizes: Sequence[int], reduce_ops: Sequence[str], bucket: int, p: float
) -> None:
    found = on_ranks(pools, 4, "partial_terms", sizes, reduce_ops, bucket, p)
    divisor = math.prod(4 // len(reduce_ops) for reduce_op in reduce_ops if reduce_op == "avg")
    reduced = [sum(terms) / divisor for terms in zip(*(gradients for _, gradients in found), strict=True)]
    for total, _ in found:
        assert total == found[0][0]
        assert total == pytest.approx(norm(reduced, p), rel=1e-6)


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_meshes_that_finish_one_after_another(pools: Pools, p: float) -> None:
    """Rows {0, 1}, {2, 3} and columns {0, 2}, {1, 3} of no common mesh: each rank adds up its own two."""
    rows, columns = {0: [1.0, 2.0], 1: [3.0, 4.0]}, {0: [5.0, 6.0, 7.0], 1: [-8.0, 9.0, 0.5]}
    for rank, (total, clipped_here, eager) in enumerate(on_ranks(pools, 4, "two_meshes", p)):
        row, column = divmod(rank, 2)
        expected = norm([np.array(rows[row]), np.array(rows[row]) + 1, np.array(columns[column]) * 3], p)
        assert total == pytest.approx(expected, rel=1e-6)
        assert eager == pytest.approx(expected, rel=1e-6)
        np.testing.assert_allclose(
            clipped_here, (np.array(rows[row]) + column) / (expected + 1e-6), rtol=1e-6
        )


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("more", "RuntimeError", "the ranks clip different tensors"),
        ("max_norm", "ValueError", "rank 1: max_norm must be at least 0"),
        ("max", "NotImplementedError", "cannot reduce Partial gradients by max"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all(pools: Pools, what: str, kind: str, text: str) -> None:
    for found, message in on_ranks(pools, 2, "failing", what):
        assert found == kind
        assert text in message


def test_a_whole_step_in_one_graph_trains_as_its_operations_do(pools: Pools) -> None:
    compiled = on_ranks(pools, 2, "training", 3, 0.5, True)
    eager = on_ranks(pools, 2, "training", 3, 0.5, False)
    for (norms, weights), (expected, right) in zip(compiled, eager, strict=True):
        assert norms == pytest.approx(expected, rel=1e-6)
        assert norms == compiled[0][0]
        np.testing.assert_allclose(weights, right, rtol=1e-6)
        assert (weights != 1).any()

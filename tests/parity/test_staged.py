"""The staged norm on every backend, with real ranks, against NumPy in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.named_backends import BACKENDS
from tests.parity.staged_cases import gradients

if TYPE_CHECKING:
    from tests.conftest import Pools

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest, pools: Pools) -> Any:
    return lambda size, function, *args: pools.get(request.param, size).run(
        f"tests.parity.staged_cases:{function}", *args, timeout=60
    )


@pytest.mark.parametrize("excluded", [[], ["tensor 1"], ["tensor 0", "tensor 4"]])
def test_norm_and_refs(run: Any, excluded: list[str]) -> None:
    kept = [g for i, g in enumerate(gradients()) if f"tensor {i}" not in excluded]
    expected = sum(float((g.astype(np.float64) ** 2).sum()) for g in kept)
    for norm_sq, again, before, after, num_refs, _ in run(4, "whole_model", excluded):
        assert norm_sq == pytest.approx(expected, rel=2e-6)
        assert again == norm_sq
        assert num_refs == len(kept)
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            np.testing.assert_array_equal(new, old if f"tensor {index}" in excluded else old * 0.5)


def test_each_shard_is_counted_by_its_smallest_rank(run: Any) -> None:
    plans = [results[-1] for results in run(4, "whole_model", [])]
    assert [plan.replica_ranks["tensor 0"] for plan in plans] == [(0,), (1,), (2,), (3,)]
    assert [plan.replica_ranks["tensor 2"] for plan in plans] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [plan.representatives["tensor 2"] for plan in plans] == [True, False, True, False]
    assert [plan.replica_ranks["tensor 3"] for plan in plans] == [(0, 1, 2, 3)] * 4
    assert [plan.representatives["tensor 3"] for plan in plans] == [True, False, False, False]


def test_main_grad_is_what_counts_and_is_scaled(run: Any) -> None:
    for norm_sq, main_grad, grad in run(2, "main_grad_counts"):
        assert norm_sq == 25.0
        np.testing.assert_array_equal(main_grad, [1.5, 2.0])
        np.testing.assert_array_equal(grad, [1.0, 2.0])


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("fqns", ["tensor 2", "missing on rank 0"]),
        ("shapes", ["tensor 0", "shape"]),
        ("hole", ["tensor 0", "2"]),
        ("overlap", ["tensor 0", "overlap"]),
    ],
)
def test_what_does_not_cover_raises_on_every_rank(run: Any, what: str, words: list[str]) -> None:
    errors = run(2, "broken", what)
    assert errors[0] == errors[1]
    assert errors[0][0] == "ValueError"
    assert all(word in errors[0][1] for word in words), errors[0][1]


def test_local_tensor_that_is_not_what_its_layout_says(run: Any) -> None:
    errors = run(2, "local_tensor_that_misfits")
    assert errors[0] == errors[1]
    assert errors[0][0] == "ValueError"
    assert "tensor 0: the local tensor has shape (2,)" in errors[0][1]


def test_gradient_on_some_copies_only(run: Any) -> None:
    for rank, (first, error, without, sharded) in enumerate(run(2, "missing_on_some_copies")):
        assert first == 27.0
        assert error == (
            "ValueError",
            "tensor 0 has a gradient on ranks [0] but none on ranks [1], which hold copies",
        )
        assert without == 2.0
        np.testing.assert_array_equal(sharded, [1.0], err_msg=f"rank {rank}")


def test_parameter_that_is_not_in_the_plan(run: Any) -> None:
    for error in run(2, "not_in_the_plan"):
        assert error[0] == "ValueError"
        assert "tensor 1 is not in the NormShardPlan" in error[1]


def test_pipeline_stages(run: Any) -> None:
    assert run(4, "stages") == [(5.0, 30.0), (5.0, 30.0), (25.0, 30.0), (25.0, 30.0)]


def test_partial_gradient_that_is_missing_on_one_copy(run: Any) -> None:
    for first, term, error in run(4, "partial_missing_on_one_copy"):
        assert (first, term) == (8.0, 8.0)
        assert error[0] == "ValueError"
        assert "tensor 0 has a gradient on ranks [2, 3] but none on ranks [0, 1]" in error[1]


def test_layout_that_has_changed_since_the_plan(run: Any) -> None:
    for error in run(2, "other_layout_than_planned"):
        assert error[0] == "ValueError"
        assert "tensor 0 lies otherwise" in error[1]


def test_trusting_layouts_takes_one_small_all_reduce(run: Any) -> None:
    assert run(4, "collectives_of_a_plan", True) == [["all_reduce"]] * 4
    assert run(4, "collectives_of_a_plan", False) == [["all_gather_object"]] * 4


def test_rank_outside_the_mesh_of_a_parameter(run: Any) -> None:
    errors = run(2, "outside_of_a_mesh")
    assert errors[0] == errors[1]
    assert errors[0][0] == "ValueError"
    assert "tensor 1" in errors[0][1]
    assert "rank 1" in errors[0][1]
    assert "outside of its mesh" in errors[0][1]

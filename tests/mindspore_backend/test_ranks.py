"""Clipping on real ranks with MCCL: every gradient that was passed in is compared with the oracle's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.mindspore_backend.oracle import Case, Spec, assert_clipped, clipped, norm, rounded

OnRanks = Callable[..., list[Any]]
ORDERS = (2.0, 1.0, 3.0, 0.5, 0.0, math.inf, -math.inf)
FORMS = ("dtensor", "attached", "grads", "functional")
MAX_NORM = 0.5

pytestmark = pytest.mark.timeout(180)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(np.float64)


def sharded(world_size: int, dtype: str = "float32", **options: Any) -> Case:
    """FSDP-like: uneven shards, ranks without any element, a 0-d copy, a plain tensor."""
    shapes = ((7, 3), (world_size - 1,), (1, 4), (2 * world_size,))
    specs = [Spec(random(*shape, seed=i), (0,), None, dtype, **options) for i, shape in enumerate(shapes)]
    specs += [Spec(random(seed=9), (None,), None, dtype), Spec(random(3, seed=10), None, None, dtype)]
    return Case((world_size,), ("dp",), tuple(specs))


def hybrid() -> Case:
    """HSDP: copies along dp, shards along fsdp."""
    specs = (Spec(random(5, 2), (None, 0)), Spec(random(1, 3), (None, 0)), Spec(random(4), (None, None)))
    return Case((2, 2), ("dp", "fsdp"), specs)


def tensor_parallel() -> Case:
    """FSDP over TP, a norm weight that is a copy on tp, a bias that lies on tp alone, and a plain tensor."""
    specs = (
        Spec(random(6, 5), (0, 1)),
        Spec(random(7, 2), (0, 0)),
        Spec(random(5), (0, None)),
        Spec(random(3), (0,), ("tp",)),
        Spec(random(4), (None, None)),
        Spec(random(2)),
    )
    return Case((2, 2), ("dp", "tp"), specs)


def check(case: Case, found: list[Any], p: float, form: str, max_norm: float = MAX_NORM) -> None:
    expected = norm(case.counted(), p)
    assert len({(result["dtype"], result["bits"]) for result in found}) == 1
    for rank, result in enumerate(found):
        assert result["shape"] == ()
        assert result["norm"] == pytest.approx(
            expected, rel=2e-6 if result["dtype"] == "float32" else 1e-2, abs=0
        )
        assert_clipped(result["results"], case, rank, expected, max_norm)
        if form == "functional":
            assert_clipped(result["grads"], case, rank, 0.0, math.inf)
        else:
            assert_clipped(result["grads"], case, rank, expected, max_norm)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards(on_ranks: OnRanks, world_size: int, form: str, p: float) -> None:
    case = sharded(world_size)
    check(case, on_ranks(world_size, "clip", case, p, MAX_NORM, form), p, form)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [hybrid(), tensor_parallel()], ids=["hsdp", "fsdp x tp"])
def test_two_dims(on_ranks: OnRanks, case: Case, form: str, p: float) -> None:
    check(case, on_ranks(4, "clip", case, p, MAX_NORM, form), p, form)


@pytest.mark.parametrize("p", [2.0, 0.0, math.inf, -math.inf])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("missing", [(0,), (1,), (0, 1)], ids=str)
def test_missing_gradients(on_ranks: OnRanks, missing: tuple[int, ...], form: str, p: float) -> None:
    """Of copies, one that is there is enough; a shard that is missing does not count."""
    specs = (
        Spec(random(5, seed=1), (None,), missing_on=missing),
        Spec(random(5, seed=2), (0,), missing_on=missing),
        Spec(random(3, seed=3), None, missing_on=missing),
        Spec(random(4, seed=4), (0,)),
    )
    case = Case((2,), ("dp",), specs)
    check(case, on_ranks(2, "clip", case, p, MAX_NORM, form), p, form)


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_without_any_gradient(on_ranks: OnRanks, form: str) -> None:
    case = Case(
        (2,), ("dp",), (Spec(random(6), (0,), missing_on=(1,)), Spec(random(2), (None,), missing_on=(1,)))
    )
    check(case, on_ranks(2, "clip", case, 2.0, MAX_NORM, form), 2.0, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_gradients_are_rounded_once(on_ranks: OnRanks, dtype: str, form: str) -> None:
    case = sharded(2, dtype)
    found = on_ranks(2, "clip", case, 2.0, MAX_NORM, form)
    expected = norm(case.counted(), 2.0)
    for rank, result in enumerate(found):
        assert result["dtype"] == dtype
        assert result["norm"] == pytest.approx(float(rounded(expected, dtype)), rel=1e-6, abs=0)
        for spec, gradient in zip(case.specs, result["results"], strict=True):
            exact = clipped(case.local(spec, rank), dtype, expected, MAX_NORM)
            different = np.sum(gradient != exact)
            assert different <= 1  # where the last bit of the coefficient decides
    check(case, found, 2.0, form)


@pytest.mark.parametrize("value", [1e20, 1e-25, 1e-38])
@pytest.mark.parametrize("p", [2.0, 3.0, math.inf])
def test_powers_beyond_float32(on_ranks: OnRanks, value: float, p: float) -> None:
    case = Case((2,), ("dp",), (Spec(rounded(np.full((5, 2), value), "float32"), (0,)),))
    found = on_ranks(2, "clip", case, p, MAX_NORM, "attached")
    check(case, found, p, "attached")


@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, 0.5, -1.0, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 2, 4])
def test_nan_on_one_rank_poisons_all(on_ranks: OnRanks, where: int, p: float) -> None:
    values = random(5)
    values[where] = math.nan
    case = Case((2,), ("dp",), (Spec(values, (0,)), Spec(random(3), (None,))))
    for result in on_ranks(2, "clip", case, p, MAX_NORM, "attached"):
        assert math.isnan(result["norm"])
        assert all(np.isnan(gradient).all() for gradient in result["grads"])


@pytest.mark.parametrize("p", [2.0, 1.0, math.inf])
def test_infinity_on_one_rank(on_ranks: OnRanks, p: float) -> None:
    values = random(5)
    values[4] = math.inf
    case = Case((2,), ("dp",), (Spec(values, (0,)),))
    for rank, result in enumerate(on_ranks(2, "clip", case, p, MAX_NORM, "attached")):
        assert result["norm"] == math.inf
        np.testing.assert_array_equal(result["grads"][0], [0.0, 0.0, 0.0] if rank == 0 else [0.0, math.nan])


@pytest.mark.parametrize("p", ORDERS)
def test_max_norm_inf_leaves_the_gradients_alone(on_ranks: OnRanks, p: float) -> None:
    case = sharded(2)
    check(case, on_ranks(2, "clip", case, p, math.inf, "grads"), p, "grads", math.inf)


@pytest.mark.parametrize("p", [2.0, 0.0, math.inf, -math.inf])
@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min"])
def test_partial_gradients_are_reduced_first(on_ranks: OnRanks, reduce_op: str, p: float) -> None:
    """A missing term is the identity of the operation; what is scaled are the terms themselves."""
    terms = ([1.0, -3.0], [2.0, 1.0])
    both = {"sum": [3.0, -2.0], "avg": [1.5, -1.0], "max": [2.0, 1.0], "min": [1.0, -3.0]}[reduce_op]
    alone = [2.0, -2.5] if reduce_op == "avg" else [4.0, -5.0]
    expected = norm([np.array(both), np.array(alone)], p)
    for rank, (found, gradient) in enumerate(on_ranks(2, "partial_gradients", reduce_op, p)):
        assert found == pytest.approx(expected, rel=1e-6, abs=0)
        scaled = np.array(terms[rank]) * min(1.0, 1.0 / (expected + 1e-6))
        np.testing.assert_allclose(gradient, scaled, rtol=1e-6)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("by", ["mesh", "group"])
def test_pipeline_stages_add_up(on_ranks: OnRanks, by: str, p: float) -> None:
    found = on_ranks(4, "pipeline", p, by)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(norm([np.array([3.0, 4.0, 0.0, 1.0, 10.0, 11.0])], p), rel=1e-6, abs=0)


def test_slices_of_two_meshes_in_one_call(on_ranks: OnRanks) -> None:
    values = [np.arange(4.0), np.array([5.0, 6.0]), np.arange(8.0)]
    for p in ORDERS:
        found = on_ranks(4, "replicas_and_slices", p)
        assert len(set(found)) == 1
        assert found[0] == pytest.approx(norm(values, p), rel=1e-6, abs=0)


@pytest.mark.parametrize("p", [2.0, math.inf])
@pytest.mark.parametrize("form", FORMS)
def test_queued_operations(on_ranks: OnRanks, form: str, p: float) -> None:
    case = sharded(2, "bfloat16") if p == 2 else sharded(2)
    check(case, on_ranks(2, "clip_asynchronously", case, p, MAX_NORM, form), p, form)


@pytest.mark.parametrize("case", [hybrid(), tensor_parallel()], ids=["hsdp", "fsdp x tp"])
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_a_step_is_one_collective(on_ranks: OnRanks, case: Case, p: float) -> None:
    for form in FORMS:
        for result in on_ranks(4, "clip", case, p, MAX_NORM, form, 3):
            assert result["calls"] == ["all_reduce"]


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("shape", "ValueError", "local tensor has shape"),
        ("expanded", "ValueError", "expanded"),
        ("kind", "TypeError", "numpy.ndarray, but the platform is mindspore"),
        ("dtype", "TypeError", "dtype Int32"),
        ("foreach", "RuntimeError", "foreach"),
        ("names", "RuntimeError", "different tensors"),
    ],
)
def test_a_mistake_of_one_rank_is_raised_on_all(
    on_ranks: OnRanks, what: str, error: str, message: str, guilty: int
) -> None:
    case = Case((2,), ("dp",), (Spec(np.full((4, 3), 9.0), (0,)), Spec(np.full(3, 9.0), (None,))))
    for rank, (kind, text, gradients) in enumerate(on_ranks(2, "failing", case, what, guilty)):
        assert (kind, rank) == (error, rank)
        assert message in text
        assert (gradients[1] == 9.0).all()
        assert rank == guilty or (gradients[0] == 9.0).all()


def test_a_nonfinite_norm_is_raised_on_all(on_ranks: OnRanks) -> None:
    values = random(5)
    values[4] = math.nan
    case = Case((2,), ("dp",), (Spec(random(3), (0,)), Spec(values, (0,))))
    for rank, (kind, text, gradients) in enumerate(on_ranks(2, "failing", case, "nonfinite", 1)):
        assert kind == "RuntimeError"
        assert "non-finite" in text
        assert "tensor 1 (ranks [1])" in text
        assert_clipped(gradients, case, rank, 0.0, math.inf)


def test_data_parallel_training_equals_one_process(on_ranks: OnRanks) -> None:
    alone = on_ranks(1, "data_parallel_training", 5, 0.7)[0]
    norms, _ = alone
    assert max(norms) > 0.7
    for found in on_ranks(2, "data_parallel_training", 5, 0.7):
        np.testing.assert_allclose(found[0], norms, rtol=1e-5)
        np.testing.assert_allclose(found[1], alone[1], rtol=1e-5)

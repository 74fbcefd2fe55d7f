"""Small inputs on which public software went wrong, on every backend. The numbers in brackets are public reports."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hyper_parallel import Partial, Replicate, Shard
from tests.known_differences import KNOWN_DIFFERENCES
from tests.named_backends import BACKENDS

if TYPE_CHECKING:
    from tests.conftest import Pools

pytestmark = pytest.mark.timeout(180)
INF = math.inf


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(backend: str, pools: Pools) -> Any:
    """Call a function of ``public_cases`` on every rank; the results by rank."""
    return lambda size, function, *args: pools.get(backend, size).run(
        f"tests.parity.public_cases:{function}", *args, timeout=60
    )


def factor(norm: float, max_norm: float = 1.0) -> float:
    return min(1.0, max_norm / (norm + 1e-6))


def assert_clipped(found: Any, norm: float, *gradients: Any) -> None:
    """``found`` is (norm, gradients after clipping) of one rank; ``gradients`` are those before."""
    assert found[0] == pytest.approx(norm, rel=1e-6)
    for after, before in zip(found[1], gradients, strict=True):
        np.testing.assert_allclose(after, np.asarray(before) * factor(norm), rtol=1e-6)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_plain_tensor_beside_a_sharded_one(
    run: Any, backend: str, foreach: bool | None
) -> None:  # accelerate 4219
    for rank, (error, found) in enumerate(run(2, "plain_beside_sharded", foreach)):
        before = [4.0], [(3.0, 0.0)[rank]]
        if (backend, f"foreach={foreach}") in KNOWN_DIFFERENCES:
            assert error[0] == "RuntimeError"
            assert "foreach" in error[1]
            assert all(np.array_equal(a, b) for a, b in zip(found, before, strict=True))
        else:
            assert error is None
            assert_clipped(found, 5.0, *before)


@pytest.mark.parametrize("p", [2.0, 1.0, 1.5, 3.0, INF])
def test_dense_and_experts(
    run: Any, p: float
) -> None:  # pytorch 180346, Megatron PR6489, DeepSpeed PR8613, PR8313
    norm = 8.0 if p == INF else (4 * 3.0**p + 8.0**p) ** (1 / p)
    assert p != 2.0 or norm == 10.0
    for rank, found in enumerate(run(4, "dense_and_experts", p)):
        assert_clipped(found, norm, [3.0], [[(0.0, 8.0)[rank % 2]]])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_eps_is_in_the_coefficient_only(run: Any, p: float) -> None:  # pytorch 149768
    for found in run(4, "tiny", p):
        assert found[0] == pytest.approx(1e-7 * 8 ** (1 / p), rel=1e-6, abs=0)


@pytest.mark.parametrize(("p", "norm"), [(2, 5), (INF, 4), (1, 7), (-INF, 3), (0, 2), (3, 91 ** (1 / 3))])
def test_pipeline_stages(run: Any, p: float, norm: float) -> None:  # torchtitan 596
    for rank, found in enumerate(run(2, "pipeline", float(p))):
        assert_clipped(found, norm, [3.0 + rank])


def test_smallest_element_across_stages(run: Any) -> None:  # torchtitan
    for rank, found in enumerate(run(2, "negative_infinity_across_stages")):
        assert_clipped(found, 3.0, [(3.0, -5.0)[rank]])


@pytest.mark.parametrize("p", [2.0, 1.0, 0.0, INF, -INF])
@pytest.mark.parametrize("kind", ["no parameters", "no gradients", "no elements"])
def test_nothing_to_do(run: Any, kind: str, p: float) -> None:  # Megatron 5529
    assert run(2, "nothing_to_do", p, kind) == [INF if p == -INF else 0.0] * 2


@pytest.mark.parametrize(("p", "norm"), [(2.0, 2.0), (1.0, 2.0), (0.0, 1.0), (INF, 2.0), (-INF, 2.0)])
def test_nothing_to_do_on_one_rank(run: Any, p: float, norm: float) -> None:  # Megatron 5529
    assert run(2, "nothing_to_do", p, "only on rank 1") == [norm] * 2


def test_replicated_norm_weight_counts_once(run: Any) -> None:  # NeMo-RL PR3788
    for found in run(4, "tensor_parallel_norm_weight"):
        assert_clipped(found, 4.0, [2.0, 2.0], np.ones((2, 1)))


def test_experts_as_plain_local_tensors(run: Any) -> None:  # Automodel 3816
    for rank, found in enumerate(run(4, "experts_as_plain_local_tensors")):
        assert_clipped(found, math.sqrt(2 * (1 + 4 + 9 + 16)), np.full((1, 2), rank + 1.0))


def test_replicas_that_disagree_share_a_coefficient(run: Any) -> None:  # VeOmni 1059
    ranks = run(2, "replicas_that_disagree", False)
    assert ranks[0][0] == ranks[1][0]
    for rank, (norm, (_, bad)) in enumerate(ranks):
        np.testing.assert_allclose(bad, np.array([3.0, 4.0 + rank]) * factor(norm), rtol=1e-6)


def test_replicas_that_disagree_are_named_on_request(run: Any) -> None:  # VeOmni 1059
    for rank, (error, gradients) in enumerate(run(2, "replicas_that_disagree", True)):
        assert error[0] == "RuntimeError"
        assert "tensor 1" in error[1]
        assert "tensor 0" not in error[1]
        np.testing.assert_array_equal(gradients[1], [3.0, 4.0 + rank])


@pytest.mark.parametrize(("p", "norm"), [(INF, 4.0), (-INF, 3.0), (0.0, 2.0), (2.0, 5.0)])
def test_empty_shard(run: Any, p: float, norm: float) -> None:  # torchrec 3809
    assert [found[0] for found in run(4, "empty_shard", p)] == [norm] * 4


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_max_norm_that_is_none(run: Any, value: float) -> None:  # pytorch 31367
    for error, gradient in run(2, "max_norm", value, [3.0, 4.0]):
        assert error[0] == "ValueError"
        assert "max_norm" in error[1]
        np.testing.assert_array_equal(gradient, [3.0, 4.0])


@pytest.mark.parametrize(
    ("value", "before", "after"),
    [
        (0.0, [0.0, 0.0], [0.0, 0.0]),
        (0.0, [3.0, 4.0], [0.0, 0.0]),
        (INF, [3.0, 4.0], [3.0, 4.0]),
        (INF, [INF, 4.0], [INF, 4.0]),
        (INF, [math.nan, 4.0], [math.nan, 4.0]),
    ],
)
def test_max_norm_at_its_ends(run: Any, value: float, before: list[float], after: list[float]) -> None:
    for error, gradient in run(2, "max_norm", value, before):
        assert error is None
        np.testing.assert_array_equal(gradient, after)


def test_mixed_dtypes(run: Any) -> None:  # Megatron PR7279, pytorch 171517
    for (norm, gradients), before, after in run(2, "mixed_dtypes"):
        assert norm == 0.25
        assert after == before
        assert ["bfloat16" in dtype or "float16" in dtype for dtype in after] == [True, False, True]
        np.testing.assert_allclose(gradients[1], np.full(64, factor(0.25, 0.125) / 64), rtol=1e-6)
        np.testing.assert_allclose(gradients[0], np.full(64, factor(0.25, 0.125) / 64), rtol=2**-8)


@pytest.mark.parametrize(("p", "norm"), [(2.0, 13.0), (1.0, 19.0), (0.0, 3.0), (INF, 12.0), (-INF, 3.0)])
def test_shared_between_stages(run: Any, p: float, norm: float) -> None:  # torchtitan 4486
    for rank, found in enumerate(run(2, "shared_between_stages", p)):
        assert_clipped(found, norm, [3.0], [(4.0, 12.0)[rank]])


def test_bf16_is_rounded_once(run: Any) -> None:  # hyper-parallel 559
    ranks = run(2, "many_bf16")
    expected = float(np.linalg.norm(np.concatenate([before for _, before, _ in ranks])))
    for norm, before, after in ranks:
        assert norm == pytest.approx(expected, rel=1e-6)
        np.testing.assert_allclose(after, before * factor(expected), rtol=2**-8, atol=1e-38)


@pytest.mark.parametrize(
    ("p", "norm"), [(INF, 3.0), (-INF, 2.0), (2.0, math.sqrt(13)), (1.0, 5.0), (0.0, 2.0)]
)
def test_partial(run: Any, p: float, norm: float) -> None:  # pytorch
    for rank, found in enumerate(run(2, "partial_sum", p)):
        assert_clipped(found, norm, [[1.0, -3.0], [2.0, 1.0]][rank])


@pytest.mark.parametrize("p", [2.0, 1.0, INF, -INF])
@pytest.mark.parametrize(("reduce_op", "divisor"), [("sum", 1), ("avg", 2), ("max", 1), ("min", 1)])
def test_partial_with_a_missing_gradient(run: Any, reduce_op: str, divisor: int, p: float) -> None:
    whole = np.array([3.0, 2.0]) / divisor
    norm = {INF: whole.max(), -INF: whole.min()}.get(p) or float((whole**p).sum() ** (1 / p))
    first, second = run(2, "partial_with_missing", reduce_op, p)
    assert_clipped(first, norm, [-3.0, 2.0])
    assert second == (pytest.approx(norm, rel=1e-6), [None])


@pytest.mark.parametrize("holder", [0, 1])
@pytest.mark.parametrize(
    "placement", [Shard(0), Replicate(), Partial(), Partial("max"), Partial("min")], ids=repr
)
@pytest.mark.parametrize("p", [2.0, 1.0, 0.5, INF, -INF])
def test_nan_survives(run: Any, p: float, placement: Any, holder: int) -> None:
    assert all(math.isnan(norm) for norm in run(2, "nan_anywhere", p, placement, holder))


@pytest.mark.parametrize("holder", [0, 1])
def test_nonfinite_raises_before_anything_changes(run: Any, holder: int) -> None:
    for error, before, after in run(2, "nonfinite_is_an_error", holder):
        assert error[0] == "RuntimeError"
        assert f"tensor 0 (ranks [{holder}])" in error[1]
        assert "tensor 1" not in error[1]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("what", ["longer", "shape", "placement", "partial"])
def test_ranks_that_pass_other_tensors_all_raise(run: Any, what: str) -> None:
    for error, untouched, fine in run(2, "lists_that_disagree", what):
        assert error is not None
        assert error[0] == "RuntimeError"
        assert "rank 0" in error[1]
        assert "rank 1" in error[1]
        assert untouched
        assert fine == pytest.approx(3.0)


def test_ill_fitting_local_shape_raises_on_all_ranks(run: Any) -> None:
    for error in run(2, "ill_fitting_local_shape"):
        assert error[0] == "ValueError"
        assert "rank 1" in error[1]
        assert "tensor 0" in error[1]


@pytest.mark.parametrize(("p", "norm"), [(2.0, 8.0), (1.0, 16.0), (INF, 4.0)])
def test_a_missing_line_is_the_identity_of_the_next_reduction(run: Any, p: float, norm: float) -> None:
    assert run(4, "two_partial_dims", p) == [pytest.approx(norm, rel=1e-6)] * 4  # -1 and -3 add up to -4


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("too many", "ValueError", "2 gradients for 1 parameters"),
        ("no tensor", "TypeError", "str, but the platform is"),
    ],
)
def test_gradients_that_are_wrong_on_one_rank_raise_on_all(
    run: Any, what: str, kind: str, message: str
) -> None:
    for error, untouched, fine in run(2, "wrong_gradients", what):
        assert error[0] == kind
        assert "rank 1" in error[1]
        assert message in error[1]
        np.testing.assert_array_equal(untouched[0], [3.0, 4.0])
        assert fine == pytest.approx(math.sqrt(50))


def test_clipping_values(run: Any) -> None:
    for gradients, error, partial in run(2, "values_clipped", 1.0):
        np.testing.assert_array_equal(gradients[0], [-1.0, 0.5, 1.0])
        np.testing.assert_array_equal(gradients[1], [1.0])
        assert error[0] == "ValueError"
        np.testing.assert_array_equal(partial[0], [5.0])

"""Collectives, meshes and DTensors on real ranks with MCCL."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.mindspore_backend.oracle import rounded
from tests.mindspore_backend.ranks import LAYOUTS

OnRanks = Callable[..., list[Any]]

pytestmark = pytest.mark.timeout(180)


def test_all_reduce_sums_exactly_and_alike(on_ranks: OnRanks) -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal((3, 20)) * 10.0 ** generator.integers(-300, 300, (3, 20))
    values[:, :4] = [[1, 2**24, 0, 5e-324], [0, 1, -0.0, 5e-324], [2**23, 3, 0, 5e-324]]
    for ranks in ((0, 1, 2), (0, 2), (1, 2)):
        found = on_ranks(3, "reduced", values.tolist(), "sum", ranks)
        assert len({found[rank] for rank in ranks}) == 1
        expected = [math.fsum(values[list(ranks), column]) for column in range(20)]
        np.testing.assert_allclose(np.frombuffer(found[ranks[0]]), expected, rtol=4e-16)


def test_all_reduce_finds_the_largest(on_ranks: OnRanks) -> None:
    values = [
        [1.5, -2.0, -math.inf, -1e-310, 0.0],
        [1.25, -3.0, -1e300, -2e-310, -0.0],
        [0.0, -4.0, -1e301, -1.0, 0.0],
    ]
    for found in on_ranks(3, "reduced", values, "max", (0, 1, 2)):
        assert np.frombuffer(found).tolist() == [1.5, -2.0, -1e300, -1e-310, 0.0]


@pytest.mark.parametrize("reduce_op", ["sum", "max"])
def test_nan_and_infinity_survive_an_all_reduce(on_ranks: OnRanks, reduce_op: str) -> None:
    values = [[math.nan, 1.0, math.inf, 0.0], [2.0, 2.0, 1.0, math.nan]]
    for found in on_ranks(2, "reduced", values, reduce_op, (0, 1)):
        nan, number, infinity, other = np.frombuffer(found)
        assert math.isnan(nan)
        assert math.isnan(other)
        assert (number, infinity) == (3.0 if reduce_op == "sum" else 2.0, math.inf)


@pytest.mark.parametrize("reduce_op", ["sum", "max", "min"])
def test_reduce_scatter_and_gather(on_ranks: OnRanks, reduce_op: str) -> None:
    terms = [np.array([1.0, 2.0, 3.0, 4.0, 0, 0, 0, 0]) * (1 + rank) for rank in range(2)]
    for term in terms:
        term[4:] = 0.5
    expected = {"sum": np.add, "max": np.maximum, "min": np.minimum}[reduce_op](*terms)
    for rank, held, gathered in on_ranks(2, "scattered", reduce_op):
        assert held == expected[4 * rank : 4 * rank + 4].tolist()
        assert gathered == [{"rank": 0}, {"rank": 1}]


def test_mesh_and_its_slices(on_ranks: OnRanks) -> None:
    for rank, found in enumerate(on_ranks(4, "mesh_api")):
        dp, tp = divmod(rank, 2)
        assert found["shape"] == (2, 2)
        assert found["size"] == (4, 2, 2, 2)
        assert found["ndim"] == (2, 1)
        assert found["names"] == (("dp", "tp"), ("tp",))
        assert found["coordinate"] == ([dp, tp], [dp])
        assert found["local_rank"] == (dp, tp, tp)
        assert found["ranks"] == ((tp, tp + 2), (2 * dp, 2 * dp + 1))
        assert found["roots"]
        assert found["whole"]
        assert found["hash"]
        assert found["tp sum"] == [4.0 * dp + 1]
        assert (0, 1, 2, 3) in found["groups"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (1, 2), (2, 2, 3)], ids=str)
def test_full_tensor_is_what_was_distributed(on_ranks: OnRanks, shape: tuple[int, ...], dtype: str) -> None:
    values = rounded(np.random.default_rng(0).standard_normal(shape), dtype)
    for found in on_ranks(4, "full_tensors", values, dtype):
        for name in LAYOUTS:
            np.testing.assert_array_equal(found[name][0], values)
        assert found["both"][1][2:] == shape[2:]


def test_full_tensor_of_partial_terms(on_ranks: OnRanks) -> None:
    for rank, found in enumerate(on_ranks(4, "partial_tensors")):
        del rank
        # copies along tp count once: those of its first coordinate, ranks 0 and 2, stand for all
        assert found == {"sum": [4.0, -2.0], "avg": [2.0, -1.0], "max": [3.0, 0.0], "min": [1.0, -2.0]}

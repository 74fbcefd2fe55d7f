"""Models that torch's own APIs shard, against the same model on one process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.torch_backend import models

if TYPE_CHECKING:
    from tests.conftest import Pools

pytestmark = pytest.mark.timeout(180)

# torch.nn.utils.clip_grad_norm_ raises for these: tensors on two meshes, or plain tensors beside DTensors.
TORCH_RAISES = ("tp", "tp+fsdp")
WORLDS = [("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4), ("tp", 2), ("tp+fsdp", 4)]
NORM_TYPES = (2.0, 1.0, 3.0, math.inf, -math.inf, 0.0)


def oracle(p: float, whole: list[np.ndarray]) -> float:
    """The norm in float64 of the one-process gradients."""
    values = np.abs(np.concatenate([gradient.ravel() for gradient in whole]))
    if math.isinf(p):
        return float(values.max() if p > 0 else values.min())
    return float(np.count_nonzero(values) if p == 0 else (values**p).sum() ** (1 / p))


def run(pools: Pools, world_size: int, function: str, *args: Any) -> list[Any]:
    """The results of a function in ``models``, by rank."""
    return pools.get("torch", world_size).run(f"tests.torch_backend.models:{function}", *args, timeout=100)


@pytest.mark.parametrize(("strategy", "world_size"), WORLDS)
def test_norm_and_gradients_are_those_of_one_process(strategy: str, world_size: int, pools: Pools) -> None:
    whole = models.reference_gradients()
    ranks = run(pools, world_size, "clip", strategy, NORM_TYPES, 1.0)
    for index, p in enumerate(NORM_TYPES):
        assert len({results[index]["norm"] for results in ranks}) == 1, (
            f"p={p}: not the same bits on all ranks"
        )
        # Sharded forward and backward passes round in another order than one process; -inf picks one tiny element.
        relative = 1e-2 if p == -math.inf else 1e-5
        for rank, found in enumerate(results[index] for results in ranks):
            assert found["norm"] == pytest.approx(oracle(p, whole), rel=relative), f"p={p}, rank {rank}"
            assert found["in place"], f"p={p}, rank {rank}"
            factor = min(1.0, 1.0 / (found["norm"] + 1e-6))
            for clipped, gradient in zip(found["gradients"], whole, strict=True):
                np.testing.assert_allclose(clipped, gradient * factor, rtol=1e-4, atol=1e-5 * factor)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize(("strategy", "world_size"), WORLDS)
def test_beside_torch(strategy: str, world_size: int, foreach: bool | None, pools: Pools) -> None:
    for found in run(pools, world_size, "beside_torch", strategy, foreach):
        if strategy in TORCH_RAISES:
            assert found["torch"] == "RuntimeError"
        else:
            assert found["ours"] == pytest.approx(found["torch"], rel=1e-6)
            for ours, theirs in zip(found["our gradients"], found["torch gradients"], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize(("strategy", "world_size"), [world for world in WORLDS if world[1] > 1])
def test_one_all_reduce_finishes_the_norm(strategy: str, world_size: int, pools: Pools) -> None:
    for first, later in run(pools, world_size, "collectives", strategy):
        assert [name.split("_")[0] for name in first] == ["c10d::allreduce"]
        assert later == first


@pytest.mark.parametrize(("strategy", "world_size"), WORLDS)
def test_infinite_max_norm_only_measures(strategy: str, world_size: int, pools: Pools) -> None:
    whole = models.reference_gradients()
    for (found,) in run(pools, world_size, "clip", strategy, (2.0,), math.inf):
        assert found["norm"] == pytest.approx(oracle(2.0, whole), rel=1e-5)
        for left, gradient in zip(found["gradients"], whole, strict=True):
            np.testing.assert_allclose(left, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp", 3), ("hsdp", 4), ("tp+fsdp", 4)])
def test_staged_norm_of_a_real_model(strategy: str, world_size: int, pools: Pools) -> None:
    names = [name for name, _ in models.Model().named_parameters()]
    whole = dict(zip(names, models.reference_gradients(), strict=True))
    excluded = ["head.weight", "blocks.1.norm.bias"]
    expected = sum(float((g**2).sum()) for name, g in whole.items() if name not in excluded)
    for found in run(pools, world_size, "staged", strategy, excluded):
        assert found["fqns"] == [name for name in names if name not in excluded]
        assert found["norm_sq"] == pytest.approx(expected, rel=2e-5)
        for name, gradient in zip(names, found["gradients"], strict=True):
            factor = 1.0 if name in excluded else 0.5
            np.testing.assert_allclose(gradient, whole[name] * factor, rtol=1e-4, atol=1e-4)

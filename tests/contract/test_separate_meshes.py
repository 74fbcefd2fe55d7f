"""Meshes that no common root links, and whose union no rank can know: each set of ranks finishes on its own."""

from __future__ import annotations

import math

import numpy as np
import pytest

import hyper_parallel
from hyper_parallel import Layout, Mesh, Replicate, Shard
from hyper_parallel.interface import LAYOUT_ATTRIBUTE
from tests.contract.numpy_platform import Parameter, Tensor
from tests.contract.numpy_world import World
from tests.unit.brute_force import local_part, norm_of

pytestmark = pytest.mark.usefixtures("numpy_ranks")

TP = (Mesh((2,), (0, 1), ("tp",)), Mesh((2,), (2, 3), ("tp",)))
DP = (Mesh((2,), (0, 2), ("dp",)), Mesh((2,), (1, 3), ("dp",)))
GROUPS = [(0, 1), (2, 3), (0, 2), (1, 3)]
A, B, C = np.arange(1.0, 7.0), np.arange(4.0).reshape(2, 2), np.array([2.0, -1.0])


def local(values: np.ndarray, mesh: Mesh | None, rank: int, placement=None) -> Parameter:
    layout = None if mesh is None else Layout(mesh, (placement or Shard(0),), values.shape)
    part = local_part(values, layout, rank)
    parameter = Parameter(np.ones(part.shape), part.view(Tensor))
    if layout is not None:
        setattr(parameter, LAYOUT_ATTRIBUTE, layout)
    return parameter


def model(rank: int) -> dict[str, Parameter]:
    """A on a mesh of two ranks, B on another, C plain."""
    return {"a": local(A, TP[rank // 2], rank), "b": local(B, DP[rank % 2], rank), "c": local(C, None, rank)}


@pytest.mark.parametrize("p", [2.0, 1.0, 0.0, math.inf, -math.inf, 3.0])
def test_the_parts_add_up_to_the_norm_of_everything(p: float) -> None:
    models = [model(rank) for rank in range(4)]
    world = World(4, GROUPS)
    norms = world.values(lambda rank: float(hyper_parallel.clip_grad_norm_(models[rank], 1.0, p)))
    expected = norm_of([A, B, C], p)
    assert norms == [pytest.approx(expected, rel=1e-6)] * 4
    for rank, parameters in enumerate(models):
        for name, parameter in parameters.items():
            before = model(rank)[name].grad
            np.testing.assert_allclose(parameter.grad, before * min(1.0, 1.0 / (expected + 1e-6)), rtol=1e-6)


def test_the_order_of_the_parts_is_that_of_the_ranks_not_of_the_parameters() -> None:
    models = [dict(reversed(model(rank).items())) if rank in (0, 3) else model(rank) for rank in range(4)]
    norms = World(4, GROUPS).values(lambda rank: float(hyper_parallel.clip_grad_norm_(models[rank], 1.0)))
    assert norms == [pytest.approx(norm_of([A, B, C], 2))] * 4


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("culprit", range(4))
def test_nan_reaches_every_rank_of_the_mesh(name: str, culprit: int) -> None:
    models = [model(rank) for rank in range(4)]
    models[culprit][name].grad.reshape(-1)[0] = math.nan
    norms = World(4, GROUPS).values(lambda rank: float(hyper_parallel.clip_grad_norm_(models[rank], 1.0)))
    mesh = TP[culprit // 2] if name == "a" else DP[culprit % 2]
    assert all(math.isnan(norms[rank]) for rank in mesh.ranks)


def test_a_missing_copy_is_found_whatever_else_each_rank_holds() -> None:
    """Rank 0 holds one parameter more than rank 2, so that equal positions are not the same parameter."""
    extra = [local(A, TP[rank // 2], rank) for rank in range(2)]
    models: list[dict[str, Parameter]] = [{} for _ in range(4)]
    for rank in (0, 2):
        if rank == 0:
            models[rank]["extra"] = extra[rank]
        models[rank]["x"] = local(C, DP[0], rank, Replicate())
        models[rank]["y"] = local(10 * C, DP[0], rank, Replicate())
    models[1]["extra"] = extra[1]
    models[0]["x"].grad = None
    models[2]["y"].grad = None
    norms = World(4, GROUPS).values(
        lambda rank: float(hyper_parallel.clip_grad_norm_(models[rank], 1.0)) if models[rank] else 0.0
    )
    assert norms[2] == pytest.approx(norm_of([C, 10 * C], 2))
    assert norms[0] == pytest.approx(norm_of([A, C, 10 * C], 2))


@pytest.mark.parametrize("culprit", range(4))
def test_an_error_on_one_rank_leaves_no_rank_waiting(culprit: int) -> None:
    models = [model(rank) for rank in range(4)]
    for parameter in (models[culprit]["a"], models[culprit]["b"]):
        parameter.grad = np.ones((7, 7)).view(Tensor)
    outcomes = World(4, GROUPS).run(lambda rank: hyper_parallel.clip_grad_norm_(models[rank], 1.0))
    partners = {*TP[culprit // 2].ranks, *DP[culprit % 2].ranks}
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, ValueError) or (rank not in partners and outcome.error is None), (
            f"rank {rank}: {outcome.error!r}"
        )


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("culprit", range(4))
def test_error_if_nonfinite_leaves_no_rank_waiting(name: str, culprit: int) -> None:
    models = [model(rank) for rank in range(4)]
    models[culprit][name].grad.reshape(-1)[0] = math.nan
    outcomes = World(4, GROUPS).run(
        lambda rank: hyper_parallel.clip_grad_norm_(models[rank], 1.0, error_if_nonfinite=True)
    )
    assert f"{name} (ranks [{culprit}])" in str(outcomes[culprit].error)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None or isinstance(outcome.error, RuntimeError), (
            f"rank {rank}: {outcome.error!r}"
        )

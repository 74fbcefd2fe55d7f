"""On an accelerator the host does not read the buffer in every step: what must hold all the same."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hyper_parallel
from hyper_parallel import Layout, Mesh, Replicate, Shard
from hyper_parallel.interface import LAYOUT_ATTRIBUTE
from tests.contract.numpy_platform import Parameter, Tensor
from tests.contract.numpy_world import World
from tests.contract.rank_cases import Case, assert_right, cases, clip_on_all_ranks

ORDERS = st.sampled_from([2.0, 1.0, 0.0, math.inf, -math.inf])
bounded = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module", autouse=True)
def device(numpy_ranks: None) -> Iterator[None]:
    platform = hyper_parallel.get_platform()
    platform.waits = True  # type: ignore[attr-defined]
    yield
    platform.waits = False  # type: ignore[attr-defined]


@bounded
@given(cases(missing=False), ORDERS, st.sampled_from([1.0, 0.0, math.inf]), st.integers(1, 3))
def test_norm_and_gradients_are_right_in_every_step(
    case: Case, p: float, max_norm: float, steps: int
) -> None:
    _, outcomes = clip_on_all_ranks(case, max_norm, p, case.groups(), steps)
    assert_right(case, outcomes, max_norm, p)
    for outcome in outcomes:
        assert [call.what[0] for call in outcome.calls] in ([], ["all_reduce"])


@bounded
@given(cases(), ORDERS)
def test_a_gradient_that_is_missing_on_some_ranks_only(case: Case, p: float) -> None:
    _, outcomes = clip_on_all_ranks(case, 1.0, p, case.groups())
    assert_right(case, outcomes, 1.0, p)


def model(rank: int, size: int, rows: int = 6) -> list[Parameter]:
    layout = Layout(Mesh((size,), tuple(range(size))), (Shard(0),), (rows,))
    local = np.ones(layout.local_shape(rank))
    parameter = Parameter(local, local.copy().view(Tensor))
    setattr(parameter, LAYOUT_ATTRIBUTE, layout)
    return [parameter]


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_a_difference_in_the_first_step_raises_everywhere(p: float) -> None:
    models = [model(rank, 3, rows=6 + (rank == 1)) for rank in range(3)]
    outcomes = World(3).run(lambda rank: hyper_parallel.clip_grad_norm_(models[rank], 0.1, p))
    assert [type(outcome.error) for outcome in outcomes] == [RuntimeError] * 3
    assert all("the ranks clip different tensors" in str(outcome.error) for outcome in outcomes)
    assert all((members[0].grad == 1).all() for members in models)


def test_an_error_on_one_rank_in_the_first_step_raises_everywhere() -> None:
    models = [model(rank, 3) for rank in range(3)]
    models[2][0].grad = np.ones(5).view(Tensor)
    outcomes = World(3).run(lambda rank: hyper_parallel.clip_grad_norm_(models[rank], 0.1))
    assert isinstance(outcomes[2].error, ValueError)
    assert all(isinstance(outcome.error, RuntimeError | ValueError) for outcome in outcomes)
    assert all((members[0].grad == 1).all() for members in models)


def test_nan_on_one_copy_reaches_every_rank() -> None:
    layout = Layout(Mesh((2,), (0, 1)), (Replicate(),), (4,))
    models = [[Parameter(np.ones(4), np.ones(4).view(Tensor))] for _ in range(2)]
    for members in models:
        setattr(members[0], LAYOUT_ATTRIBUTE, layout)
    models[1][0].grad[3] = math.nan
    for p in (2.0, math.inf, -math.inf):
        norms = World(2).values(
            lambda rank, p=p: float(hyper_parallel.clip_grad_norm_(models[rank], math.inf, p))
        )
        assert all(map(math.isnan, norms))

"""Properties over random meshes, placements, shapes and missing gradients, on one to six simulated ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hyper_parallel
from tests.contract.numpy_world import World
from tests.contract.rank_cases import Case, assert_right, cases, clip_on_all_ranks
from tests.unit.brute_force import norm_of

pytestmark = pytest.mark.usefixtures("numpy_ranks")

ORDERS = st.sampled_from([2.0, 1.0, 3.0, 0.0, math.inf, -math.inf, 0.5])
MAX_NORMS = st.sampled_from([1.0, 0.25, 100.0, 0.0, math.inf])
bounded = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def shape_of_calls(outcome) -> list:
    """The collectives of one rank, whatever group of its own it ran each over."""
    return [(call.what, len(call.ranks)) for call in outcome.calls]


@bounded
@given(cases(), ORDERS, MAX_NORMS)
def test_norm_and_gradients_are_right_on_every_rank(case: Case, p: float, max_norm: float) -> None:
    _, outcomes = clip_on_all_ranks(case, max_norm, p, case.groups())
    assert_right(case, outcomes, max_norm, p)


@bounded
@given(cases(), ORDERS)
def test_right_also_where_only_mesh_dims_have_process_groups(case: Case, p: float) -> None:
    _, outcomes = clip_on_all_ranks(case, 1.0, p, case.mesh_groups())
    assert_right(case, outcomes, 1.0, p)


@bounded
@given(cases(), ORDERS)
def test_right_in_the_second_step_too(case: Case, p: float) -> None:
    _, outcomes = clip_on_all_ranks(case, 1.0, p, case.groups(), steps=2)
    assert_right(case, outcomes, 1.0, p)


@bounded
@given(cases(missing=False), ORDERS, st.integers(1, 2))
def test_one_all_reduce_is_all_if_no_gradient_is_missing_on_some_ranks_only(
    case: Case, p: float, steps: int
) -> None:
    _, outcomes = clip_on_all_ranks(case, 1.0, p, case.groups(), steps)
    for rank, outcome in enumerate(outcomes):
        outcome.get()
        alone = len(case.together(rank)) == 1
        assert [call.what[0] for call in outcome.calls] == ([] if alone else ["all_reduce"])


@bounded
@given(cases(), ORDERS)
def test_every_rank_enters_the_same_collectives_and_at_most_three(case: Case, p: float) -> None:
    _, outcomes = clip_on_all_ranks(case, 1.0, p, case.groups())
    for rank, outcome in enumerate(outcomes):
        outcome.get()
        partners = [outcomes[other] for other in case.together(rank)]
        assert all(partner.calls == outcome.calls for partner in partners)
        assert len(outcome.calls) <= (3 if case.uneven() and not math.isinf(p) else 1)


@bounded
@given(cases(), ORDERS)
def test_every_rank_enters_the_same_collectives_one_mesh_dim_after_another(case: Case, p: float) -> None:
    _, outcomes = clip_on_all_ranks(case, 1.0, p, case.mesh_groups())
    for rank, outcome in enumerate(outcomes):
        outcome.get()
        assert all(
            shape_of_calls(outcomes[other]) == shape_of_calls(outcome) for other in case.together(rank)
        )


@bounded
@given(cases(), ORDERS, st.randoms(use_true_random=False))
def test_nan_on_a_single_rank_makes_the_norm_nan_everywhere(case: Case, p: float, random) -> None:
    models = [case.model(rank) for rank in range(case.world_size)]
    held = [(r, g) for r, model in enumerate(models) for q in model if (g := q.grad) is not None and g.size]
    if p == 0 or not held:
        return
    culprit, gradient = random.choice(held)
    gradient.reshape(-1)[random.randrange(gradient.size)] = math.nan
    world = World(case.world_size, case.groups())
    norms = world.values(lambda rank: float(hyper_parallel.clip_grad_norm_(models[rank], 1.0, p)))
    for rank in case.together(culprit):
        assert math.isnan(norms[rank])
        assert all(np.isnan(q.grad).all() for q in models[rank] if q.grad is not None)


@bounded
@given(cases(), ORDERS)
def test_get_total_norm_and_functional_clipping_agree_with_clip_grad_norm(case: Case, p: float) -> None:
    models = [case.model(rank) for rank in range(case.world_size)]

    def call(rank: int) -> tuple[list, float]:
        given = [parameter.grad for parameter in models[rank]]
        before = [None if gradient is None else gradient.copy() for gradient in given]
        clipped, norm = hyper_parallel.clip_grads(given, 1.0, p, params=models[rank])
        assert all(g is None or (g == b).all() for g, b in zip(given, before, strict=True))
        return clipped, norm

    world = World(case.world_size, case.groups())
    functional = world.values(call)
    in_place = world.values(lambda rank: hyper_parallel.clip_grad_norm_(models[rank], 1.0, p))
    for rank, (clipped, norm) in enumerate(functional):
        assert np.asarray(norm).tobytes() == np.asarray(in_place[rank]).tobytes()
        for gradient, parameter in zip(clipped, models[rank], strict=True):
            assert (gradient is None) == (parameter.grad is None)
            assert gradient is None or np.array_equal(gradient, parameter.grad)


@bounded
@given(cases(missing=False))
def test_error_if_nonfinite_raises_on_every_rank_and_changes_nothing(case: Case) -> None:
    models = [case.model(rank) for rank in range(case.world_size)]
    victims = [i for i, q in enumerate(models[0]) if q.grad is not None and q.grad.size]
    if not victims:
        return
    models[0][victims[0]].grad.reshape(-1)[0] = math.inf
    before = [[None if q.grad is None else q.grad.copy() for q in model] for model in models]
    world = World(case.world_size, case.groups())
    outcomes = world.run(lambda r: hyper_parallel.clip_grad_norm_(models[r], 1.0, error_if_nonfinite=True))
    for rank in case.together(0):
        assert isinstance(outcomes[rank].error, RuntimeError)
        assert f"tensor {victims[0]} (ranks [0" in str(outcomes[rank].error)
        for parameter, gradient in zip(models[rank], before[rank], strict=True):
            assert gradient is None or np.array_equal(parameter.grad, gradient)


def test_the_oracle_itself_on_a_worked_example() -> None:
    assert norm_of([np.array([3.0, -4.0])], 2) == 5
    assert norm_of([np.array([3.0]), np.array([-4.0])], 1) == 7
    assert norm_of([], 2) == 0
    assert norm_of([], -math.inf) == math.inf
    assert norm_of([np.array([0.0, 2.0])], 0) == 1
    assert norm_of([np.array([1e200, 1e200])], 2) == pytest.approx(math.sqrt(2) * 1e200)

"""Partial gradients on simulated ranks: reduced before the norm, whatever the ops, the mesh and the buckets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hyper_parallel
from hyper_parallel import Layout, Mesh, Partial, Replicate
from tests.contract.numpy_platform import Tensor
from tests.contract.numpy_world import World
from tests.contract.partial_cases import (
    OPS,
    PartialCase,
    Terms,
    assert_same_sequence,
    partial_cases,
    small_buckets,
)
from tests.contract.rank_cases import assert_right, clip_on_all_ranks

pytestmark = [
    pytest.mark.usefixtures("numpy_ranks"),
    pytest.mark.filterwarnings("ignore:no tensor carries a gradient"),
]

ORDERS = st.sampled_from([2.0, 1.0, 0.5, 0.0, -1.0, math.inf, -math.inf])
bounded = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@bounded
@given(partial_cases(), ORDERS, st.sampled_from([1.0, 0.25, 0.0, math.inf]), st.integers(1, 2))
def test_norm_and_raw_local_gradients_are_right_on_every_rank(
    case: PartialCase, p: float, max_norm: float, steps: int
) -> None:
    with small_buckets(case.bucket):
        _, outcomes = clip_on_all_ranks(case, max_norm, p, case.process_groups(), steps)
    assert_right(case, outcomes, max_norm, p)
    assert_same_sequence(outcomes)


@bounded
@given(partial_cases(missing=False), ORDERS)
def test_no_bucket_is_larger_than_it_may_be_and_no_collective_is_in_vain(case: PartialCase, p: float) -> None:
    with small_buckets(case.bucket):
        _, outcomes = clip_on_all_ranks(case, 1.0, p, case.process_groups(), steps=2)
    for rank, outcome in enumerate(outcomes):
        outcome.get()
        scatters = [call for call in outcome.calls if call.what[0] == "reduce_scatter"]
        lines = [line for spec in case.specs if isinstance(spec, Terms) for line in spec.lines(rank)]
        numels = [np.prod(q.grad.shape) for q in case.model(rank)]
        assert {call.ranks for call in scatters} <= {ranks for ranks, _ in lines}
        assert all(call.what[2][0] < case.bucket + case.world_size for call in scatters)
        assert len(scatters) <= len(lines) + sum(numels) / case.bucket * 3


@bounded
@given(partial_cases(), ORDERS, st.randoms(use_true_random=False))
def test_nan_in_one_term_makes_the_norm_nan_everywhere(case: PartialCase, p: float, random: Any) -> None:
    models = [case.model(rank) for rank in range(case.world_size)]
    held = [(r, g) for r, model in enumerate(models) for q in model if (g := q.grad) is not None and g.size]
    if p == 0 or not held:
        return
    culprit, gradient = random.choice(held)
    gradient.reshape(-1)[random.randrange(gradient.size)] = math.nan
    with small_buckets(case.bucket):
        world = World(case.world_size, case.process_groups())
        norms = world.values(lambda rank: float(hyper_parallel.clip_grad_norm_(models[rank], 1.0, p)))
    for rank in case.together(culprit):
        assert math.isnan(norms[rank])
        assert all(np.isnan(q.grad).all() for q in models[rank] if q.grad is not None)


@bounded
@given(partial_cases(), ORDERS)
def test_functional_clipping_and_get_total_norm_agree_with_clip_grad_norm(
    case: PartialCase, p: float
) -> None:
    models = [case.model(rank) for rank in range(case.world_size)]

    def call(rank: int) -> tuple[Any, Any, Any]:
        given = [parameter.grad for parameter in models[rank]]
        clipped, norm = hyper_parallel.clip_grads(given, 1.0, p, params=models[rank])
        return clipped, norm, hyper_parallel.clip_grad_norm_(models[rank], 1.0, p)

    with small_buckets(case.bucket):
        for rank, (clipped, norm, again) in enumerate(
            World(case.world_size, case.process_groups()).values(call)
        ):
            assert np.asarray(norm).tobytes() == np.asarray(again).tobytes()
            for gradient, parameter in zip(clipped, models[rank], strict=True):
                assert gradient is parameter.grad or np.array_equal(gradient, parameter.grad)

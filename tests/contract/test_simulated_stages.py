"""Pipelines on simulated ranks: the stages' norms add up, on all ranks alike, and what stages share counts once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.numpy_platform import NumpyMath, Tensor
from tests.contract.numpy_world import Outcome, World
from tests.contract.partial_cases import assert_same_sequence, small_buckets
from tests.contract.stage_cases import (
    Pipeline,
    assert_pipeline_right,
    clip_pipeline,
    pipelines,
    set_gradients,
)

pytestmark = [
    pytest.mark.usefixtures("numpy_ranks"),
    pytest.mark.filterwarnings("ignore:no tensor carries a gradient"),
    pytest.mark.filterwarnings("ignore:divide by zero"),
]

ORDERS = st.sampled_from([2.0, 1.0, 0.5, 0.0, -1.0, math.inf, -math.inf])
bounded = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("waits", [False, True])
@bounded
@given(pipelines(), ORDERS, st.sampled_from([1.0, 0.0, math.inf]))
def test_norm_and_gradients_are_right_on_every_rank_in_every_step(
    waits: bool, case: Pipeline, p: float, max_norm: float
) -> None:
    with pytest.MonkeyPatch.context() as patch, small_buckets(7):
        patch.setattr(NumpyMath, "waits", waits)
        world = World(case.world_size, case.groups())
        models = [case.model(rank) for rank in range(case.world_size)]
        for _ in range(2):
            set_gradients(case, models)
            outcomes = clip_pipeline(case, models, world, p, max_norm)
            assert_pipeline_right(case, outcomes, p, max_norm)
            assert_same_sequence(outcomes)


@bounded
@given(pipelines(missing=True), ORDERS)
def test_gradients_that_are_missing_on_some_ranks(case: Pipeline, p: float) -> None:
    with small_buckets(7):
        world = World(case.world_size, case.groups())
        models = [case.model(rank) for rank in range(case.world_size)]
        outcomes = clip_pipeline(case, models, world, p)
    assert_pipeline_right(case, outcomes, p)
    assert_same_sequence(outcomes)


@bounded
@given(pipelines(rooted=True, partial=False).filter(lambda case: case.united), ORDERS)
def test_with_a_root_all_stages_together_are_one_all_reduce(case: Pipeline, p: float) -> None:
    with small_buckets(7):
        world = World(case.world_size, case.groups())
        models = [case.model(rank) for rank in range(case.world_size)]
        clip_pipeline(case, models, world, p)
        outcomes = clip_pipeline(case, models, world, p)
    everyone = tuple(range(case.world_size))
    for outcome in outcomes:
        outcome.get()
        assert [(call.what[0], call.ranks) for call in outcome.calls] == [("all_reduce", everyone)]


@bounded
@given(pipelines(rooted=False, partial=False).filter(lambda case: case.united), ORDERS)
def test_without_a_root_it_is_one_in_the_stage_and_one_through_the_stages(case: Pipeline, p: float) -> None:
    with small_buckets(7):
        world = World(case.world_size, case.groups())
        models = [case.model(rank) for rank in range(case.world_size)]
        clip_pipeline(case, models, world, p)
        outcomes = clip_pipeline(case, models, world, p)
    for rank, outcome in enumerate(outcomes):
        outcome.get()
        groups = [tuple(sorted(group)) for group in (case.together(rank), case.line(rank)) if len(group) > 1]
        assert [(call.what[0], call.ranks) for call in outcome.calls] == [("all_reduce", g) for g in groups]


def snapshot(models: list[Any]) -> list[Any]:
    return [[None if q.grad is None else np.array(q.grad) for q in model] for model in models]


def assert_untouched(models: list[Any], before: list[Any]) -> None:
    for model, kept in zip(models, before, strict=True):
        for parameter, gradient in zip(model, kept, strict=True):
            assert gradient is None or np.array_equal(parameter.grad, gradient, equal_nan=True)


def assert_all_raise(outcomes: list[Outcome], kind: type[Exception], *words: str) -> None:
    for outcome in outcomes:
        assert type(outcome.error) is kind, f"{outcome.error!r} {outcome.value}"
        assert all(word in str(outcome.error) for word in words), str(outcome.error)
    assert len({str(outcome.error) for outcome in outcomes}) == 1


def speaking(case: Pipeline) -> list[int]:
    """Ranks with a parameter, whose errors all ranks of their stage can hear of."""
    return [
        rank
        for rank in range(case.world_size)
        if case.specs(rank)
        and (case.rooted or len(case.together(rank)) * len(case.stages) == case.world_size)
    ]


@pytest.mark.parametrize("waits", [False, True])
@bounded
@given(pipelines(), ORDERS, st.booleans(), st.data())
def test_an_error_on_one_rank_is_raised_on_every_rank_of_every_stage(
    waits: bool, case: Pipeline, p: float, at_first: bool, data: Any
) -> None:
    culprits = [r for r in speaking(case) if any(s.layouts[r] is not None for s in case.specs(r))]
    if not culprits or any(
        rank not in speaking(case) and case.specs(rank) for rank in range(case.world_size)
    ):
        return
    culprit = data.draw(st.sampled_from(culprits))
    with pytest.MonkeyPatch.context() as patch, small_buckets(7):
        patch.setattr(NumpyMath, "waits", waits)
        world = World(case.world_size, case.groups())
        models = [case.model(rank) for rank in range(case.world_size)]
        if not at_first:
            clip_pipeline(case, models, world, p, math.inf)
        index = next(i for i, s in enumerate(case.specs(culprit)) if s.layouts[culprit] is not None)
        fresh = case.model(culprit)
        fresh[index].grad = np.ones((7, 7, 7, 7)).view(Tensor)
        models[culprit] = fresh
        before = snapshot(models)
        outcomes = clip_pipeline(case, models, world, p)
    assert_all_raise(outcomes, ValueError, f"rank {culprit}: tensor {index}", "(7, 7, 7, 7)")
    assert_untouched(models, before)
    assert_same_sequence(outcomes)


@bounded
@given(pipelines(), st.sampled_from([2.0, 1.0, math.inf]), st.data())
def test_error_if_nonfinite_names_the_tensor_and_the_rank_on_all_stages(
    case: Pipeline, p: float, data: Any
) -> None:
    models = [case.model(rank) for rank in range(case.world_size)]
    held = [(r, i) for r, model in enumerate(models) for i, q in enumerate(model) if q.grad.size]
    held = [(r, i) for r, i in held if r in speaking(case)]
    if not held:
        return
    culprit, index = data.draw(st.sampled_from(held))
    models[culprit][index].grad.reshape(-1)[0] = math.nan
    before = snapshot(models)
    with small_buckets(7):
        world = World(case.world_size, case.groups())
        outcomes = clip_pipeline(case, models, world, p, error_if_nonfinite=True)
    line = range(case.world_size) if case.rooted else [*case.together(culprit), *case.line(culprit)]
    assert_all_raise([outcomes[rank] for rank in line], RuntimeError, f"tensor {index} (ranks [{culprit}])")
    assert_untouched(models, before)
    assert_same_sequence(outcomes)

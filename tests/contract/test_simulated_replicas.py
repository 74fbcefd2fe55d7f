"""``check_replicas`` and ``clip_grad_value_`` on simulated ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hyper_parallel
from hyper_parallel import Layout, Mesh, Replicate
from hyper_parallel.interface import LAYOUT_ATTRIBUTE
from tests.contract.numpy_platform import NumpyMath, Parameter, Tensor
from tests.contract.numpy_world import World
from tests.contract.partial_cases import (
    PartialCase,
    Terms,
    assert_same_sequence,
    partial_cases,
    small_buckets,
)
from tests.contract.rank_cases import Case, Spec, assert_right, cases, clip_on_all_ranks
from tests.contract.stage_cases import Pipeline, assert_pipeline_right, clip_pipeline, pipelines
from tests.unit.brute_force import held_grid

pytestmark = [
    pytest.mark.usefixtures("numpy_ranks"),
    pytest.mark.filterwarnings("ignore:no tensor carries a gradient"),
    pytest.mark.filterwarnings("ignore:divide by zero"),
]

ORDERS = st.sampled_from([2.0, 1.0, 0.0, math.inf, -math.inf])
bounded = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def held(spec: Any, rank: int) -> np.ndarray:
    """The elements of the global tensor that ``rank`` holds, as a bitmap."""
    shape = spec.layouts[rank].global_shape if spec.layouts[rank] is not None else spec.values.shape
    bitmap = np.zeros(shape, bool)
    bitmap[... if spec.layouts[rank] is None else held_grid(spec.layouts[rank], rank)] = True
    return bitmap


def copies(specs: list[Any], rank: int, together: Any) -> list[int]:
    """The tensors of which another rank holds the same elements as ``rank``, and some."""
    return [
        index
        for index, spec in enumerate(specs)
        if isinstance(spec, Spec) and spec.present[rank] and held(spec, rank).any()
        if any(spec.present[r] and (held(spec, r) == held(spec, rank)).all() for r in together if r != rank)
    ]


def snapshot(models: list[Any]) -> list[Any]:
    return [[None if q.grad is None else np.array(q.grad) for q in model] for model in models]


def spoil(parameter: Parameter, value: float | None, data: Any) -> None:
    """Change one element so that it differs, to NaN for instance."""
    flat = parameter.grad.reshape(-1)
    position = data.draw(st.integers(0, flat.size - 1))
    flat[position] = flat[position] + 0.25 if value is None else value


@bounded
@given(partial_cases(), ORDERS)
def test_equal_copies_are_found_equal_and_partial_terms_are_no_copies(case: PartialCase, p: float) -> None:
    with small_buckets(case.bucket):
        _, outcomes = clip_on_all_ranks(case, 1.0, p, case.process_groups(), check_replicas=True)
    assert_right(case, outcomes, 1.0, p)
    assert_same_sequence(outcomes)


@bounded
@given(pipelines(missing=True), ORDERS)
def test_equal_copies_on_every_stage(case: Pipeline, p: float) -> None:
    with small_buckets(7):
        models = [case.model(rank) for rank in range(case.world_size)]
        world = World(case.world_size, case.groups())
        assert_pipeline_right(case, clip_pipeline(case, models, world, p, check_replicas=True), p)


@bounded
@given(partial_cases(), ORDERS, st.sampled_from([None, None, math.nan, math.inf]), st.data())
def test_one_element_that_differs_in_one_copy_is_found_on_every_rank(
    case: PartialCase, p: float, value: float | None, data: Any
) -> None:
    models = [case.model(rank) for rank in range(case.world_size)]
    culprits = [(r, i) for r in range(case.world_size) for i in copies(list(case.specs), r, case.together(r))]
    if not culprits:
        return
    culprit, index = data.draw(st.sampled_from(culprits))
    spoil(models[culprit][index], value, data)
    before = snapshot(models)
    with small_buckets(case.bucket):
        world = World(case.world_size, case.process_groups())
        outcomes = world.run(
            lambda rank: hyper_parallel.clip_grad_norm_(models[rank], 1.0, p, check_replicas=True)
        )
    for rank in case.together(culprit):
        text = str(outcomes[rank].error)
        assert isinstance(outcomes[rank].error, RuntimeError), text
        assert "the copies of these gradients differ between ranks" in text
        assert {f"tensor {i}" in text for i in range(len(case.specs)) if i != index} <= {False}
        assert f"tensor {index}" in text
        for parameter, gradient in zip(models[rank], before[rank], strict=True):
            assert gradient is None or np.array_equal(parameter.grad, gradient, equal_nan=True)
    assert_same_sequence(outcomes)


@bounded
@given(pipelines(), st.data())
def test_a_copy_that_differs_on_one_stage_is_told_to_all(case: Pipeline, data: Any) -> None:
    models = [case.model(rank) for rank in range(case.world_size)]
    culprits = [(r, i) for r in range(case.world_size) for i in copies(case.specs(r), r, case.together(r))]
    if not culprits or not case.rooted:
        return
    culprit, index = data.draw(st.sampled_from(culprits))
    spoil(models[culprit][index], None, data)
    with small_buckets(7):
        outcomes = clip_pipeline(
            case, models, World(case.world_size, case.groups()), 2.0, check_replicas=True
        )
    for outcome in outcomes:
        assert isinstance(outcome.error, RuntimeError)
        assert f"differ between ranks: tensor {index}" in str(outcome.error)


def replicated(values: Any) -> Parameter:
    parameter = Parameter(np.ones(3), np.array(values, np.float32).view(Tensor))
    setattr(parameter, LAYOUT_ATTRIBUTE, Layout(Mesh((2,), (0, 1)), (Replicate(),), (3,)))
    return parameter


def check(models: list[list[Parameter]]) -> list[Any]:
    return World(2).run(lambda r: float(hyper_parallel.clip_grad_norm_(models[r], 1.0, check_replicas=True)))


def test_equal_infinities_and_nan_are_no_difference() -> None:
    for value in (math.inf, -math.inf, math.nan):
        outcomes = check([[replicated([1.0, value, 2.0])] for _ in range(2)])
        assert not any(outcome.error for outcome in outcomes)


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1.25])
def test_a_checksum_that_is_a_sum_finds_them_too(odd: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumpyMath, "checksum", lambda self, tensor: np.sum(tensor, dtype=np.float64))
    for outcome in check([[replicated([1.0, odd if rank else 1.0, 2.0])] for rank in range(2)]):
        assert "differ between ranks: tensor 0" in str(outcome.error)
    outcomes = check([[replicated([1.0, odd, 0.0 if rank else -0.0])] for rank in range(2)])
    assert not any(outcome.error for outcome in outcomes)


def test_the_first_ten_tensors_that_differ_are_named() -> None:
    outcomes = check([[replicated([1.0, 2.0, rank]) for _ in range(12)] for rank in range(2)])
    for outcome in outcomes:
        assert "tensor 0, tensor 1," in str(outcome.error)
        assert "tensor 9" in str(outcome.error)


def test_ranks_that_clip_different_tensors_are_told_so_with_the_check_on() -> None:
    outcomes = check(
        [[replicated([1.0, 2.0, 3.0])] * (rank + 1) + [replicated([0, 0, 0])] * rank for rank in range(2)]
    )
    for outcome in outcomes:
        assert "the ranks clip different tensors" in str(outcome.error)


# ---- clip_grad_value_


@bounded
@given(cases(), st.sampled_from([0.0, 0.25, 1.0, math.inf]))
def test_values_are_clamped_on_every_rank_and_nothing_is_communicated(case: Case, bound: float) -> None:
    models = [case.model(rank) for rank in range(case.world_size)]
    before = snapshot(models)
    world = World(case.world_size, case.groups())
    outcomes = world.run(lambda rank: hyper_parallel.clip_grad_value_(models[rank], bound))
    for model, kept, outcome in zip(models, before, outcomes, strict=True):
        assert outcome.get() is None
        assert outcome.calls == []
        for parameter, gradient in zip(model, kept, strict=True):
            assert (parameter.grad is None) == (gradient is None)
            if gradient is not None:
                assert np.array_equal(parameter.grad, np.maximum(np.minimum(gradient, bound), -bound))
                assert parameter.grad.dtype == gradient.dtype


@bounded
@given(partial_cases(), st.sampled_from([0.0, 1.0]))
def test_a_partial_gradient_is_refused_before_anything_changes(case: PartialCase, bound: float) -> None:
    models = [case.model(rank) for rank in range(case.world_size)]
    before = snapshot(models)
    first = next(index for index, spec in enumerate(case.specs) if isinstance(spec, Terms))
    outcomes = World(case.world_size).run(lambda rank: hyper_parallel.clip_grad_value_(models[rank], bound))
    for model, kept, outcome in zip(models, before, outcomes, strict=True):
        assert isinstance(outcome.error, ValueError)
        assert f"tensor {first} is" in str(outcome.error)
        for parameter, gradient in zip(model, kept, strict=True):
            assert gradient is None or np.array_equal(parameter.grad, gradient)


@pytest.mark.parametrize("bound", [-1.0, math.nan])
def test_a_bound_that_is_none(bound: float) -> None:
    with pytest.raises(ValueError, match="clip_value must be at least 0"):
        hyper_parallel.clip_grad_value_([replicated([1.0, 2.0, 3.0])], bound)

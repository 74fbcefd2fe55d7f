"""Parameters that several pipeline stages share, and what changes about that from call to call."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hyper_parallel
from hyper_parallel import Layout, Mesh, Partial, Replicate, Shard
from hyper_parallel.interface import LAYOUT_ATTRIBUTE, SHARED_ATTRIBUTE
from tests.contract.numpy_platform import NumpyMath, Parameter, Tensor
from tests.contract.numpy_world import World
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

bounded = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
ORDERS = st.sampled_from([2.0, 1.0, 0.0, math.inf, -math.inf])


def without(case: Pipeline, stage: int) -> Pipeline:
    """The same pipeline, one stage of which no longer holds its last parameter."""
    stages = list(case.stages)
    stages[stage] = stages[stage][:-1]
    return replace(case, stages=tuple(stages))


@pytest.mark.parametrize("waits", [False, True])
@bounded
@given(pipelines(), ORDERS, st.lists(st.integers(0, 7), min_size=1, max_size=2))
def test_right_in_every_call_while_stages_drop_parameters_and_get_them_back(
    waits: bool, case: Pipeline, p: float, drops: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch, small_buckets(7):
        patch.setattr(NumpyMath, "waits", waits)
        world = World(case.world_size, case.groups())
        models = [case.model(rank) for rank in range(case.world_size)]
        smaller = case
        for drop in drops:
            smaller = without(smaller, drop % len(case.stages))
            for now in (case, smaller, smaller):
                held = [models[rank][: len(now.specs(rank))] for rank in range(case.world_size)]
                set_gradients(now, held)
                outcomes = clip_pipeline(now, held, world, p)
                assert_pipeline_right(now, outcomes, p)
                assert_same_sequence(outcomes)


def mark(case: Pipeline, models: list[list[Parameter]], rank: int) -> None:
    for (key, _), parameter in zip(case.stages[case.stage(rank)], models[rank], strict=True):
        if key is not None:
            hyper_parallel.mark_shared(parameter, key)


@bounded
@given(pipelines(), ORDERS)
def test_marks_that_are_set_after_the_first_call(case: Pipeline, p: float) -> None:
    unmarked = replace(
        case, stages=tuple(tuple((None, spec) for _, spec in members) for members in case.stages)
    )
    with small_buckets(7):
        world = World(case.world_size, case.groups())
        models = [unmarked.model(rank) for rank in range(case.world_size)]
        assert_pipeline_right(unmarked, clip_pipeline(unmarked, models, world, p), p)
        world.run(lambda rank: mark(case, models, rank))
        for _ in range(2):
            set_gradients(case, models)
            outcomes = clip_pipeline(case, models, world, p)
            assert_pipeline_right(case, outcomes, p)
            assert_same_sequence(outcomes)


# ---- worked examples: two stages of two ranks

ROOT = Mesh((2, 2), (0, 1, 2, 3), ("pp", "dp"))
GROUPS = {(0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3)}
LINKS = pytest.mark.parametrize("rooted", [True, False])


def mesh_of(rank: int, dim: int, rooted: bool) -> Mesh:
    return Mesh((2,), ROOT.slice_ranks(rank, (dim,)), ROOT.dim_names[dim : dim + 1], ROOT if rooted else None)


def graded(rank: int, rooted: bool, placement: Any = None, value: float = 1.0) -> Parameter:
    """A parameter of 4 elements on the two ranks of a stage."""
    layout = Layout(mesh_of(rank, 1, rooted), (placement or Shard(0),), (4,))
    shape = layout.local_shape(rank)
    parameter = Parameter(np.ones(shape), np.full(shape, value).view(Tensor))
    setattr(parameter, LAYOUT_ATTRIBUTE, layout)
    return parameter


def clip(models: list[list[Parameter]], rooted: bool, **more: Any) -> list[Any]:
    def step(rank: int) -> float:
        mesh = mesh_of(rank, 0, rooted)
        return float(hyper_parallel.clip_grad_norm_(models[rank], 0.1, pp_mesh=mesh, **more))

    return World(4, GROUPS).run(step)


@LINKS
def test_an_embedding_on_two_stages_counts_once_and_is_scaled_on_both(rooted: bool) -> None:
    with small_buckets(7):
        models = [[hyper_parallel.mark_shared(graded(r, rooted), "emb"), graded(r, rooted)] for r in range(4)]
        assert [o.get() for o in clip(models, rooted)] == [pytest.approx(math.sqrt(12))] * 4
    for model in models:
        for parameter in model:
            np.testing.assert_allclose(parameter.grad, 0.1 / math.sqrt(12), rtol=1e-6)


@LINKS
def test_a_key_that_only_one_stage_declares_counts_as_if_it_had_none(rooted: bool) -> None:
    with small_buckets(7):
        models = [[graded(rank, rooted)] for rank in range(4)]
        for rank in (0, 1):
            hyper_parallel.mark_shared(models[rank][0], "emb")
        assert [o.get() for o in clip(models, rooted)] == [pytest.approx(math.sqrt(8))] * 4


@LINKS
def test_counts_once_also_while_another_gradient_is_missing_on_some_copies(rooted: bool) -> None:
    with small_buckets(7):
        models = [
            [hyper_parallel.mark_shared(graded(rank, rooted), "emb"), graded(rank, rooted, Replicate())]
            for rank in range(4)
        ]
        models[0][1].grad = None
        assert [o.get() for o in clip(models, rooted)] == [pytest.approx(math.sqrt(12))] * 4


@pytest.mark.xfail(
    reason="each stage contributes 1/n of a shared gradient, whether the others have theirs or not"
)
@LINKS
def test_a_shared_gradient_that_is_missing_on_one_stage_still_counts_once(rooted: bool) -> None:
    with small_buckets(7):
        models = [[hyper_parallel.mark_shared(graded(rank, rooted), "emb")] for rank in range(4)]
        models[2][0].grad = models[3][0].grad = None
        assert [o.get() for o in clip(models, rooted)] == [pytest.approx(2.0)] * 4


@LINKS
def test_a_layout_attached_on_one_rank_between_calls_leaves_no_other_waiting(rooted: bool) -> None:
    """Three stages of two ranks. Ranks of the middle one share nothing, but know what the others share."""
    root = Mesh((3, 2), tuple(range(6)), ("pp", "dp"))

    def step(rank: int) -> list[float]:
        lines = [Mesh((3 - d,), root.slice_ranks(rank, (d,)), None, root if rooted else None) for d in (0, 1)]
        norms = []
        for _ in range(2):
            parameter = Parameter(np.ones(2), np.ones(2).view(Tensor))
            setattr(parameter, LAYOUT_ATTRIBUTE, Layout(lines[1], (Shard(0),), (4,)))
            models.append(parameter)
            if rank not in (2, 3):
                setattr(parameter, SHARED_ATTRIBUTE, "emb")
            norms.append(float(hyper_parallel.clip_grad_norm_([parameter], 0.1, pp_mesh=lines[0])))
            if rank == 2:
                hyper_parallel.attach_layout(np.ones(2).view(Tensor), lines[1], [Replicate()])
        return norms

    models: list[Parameter] = []
    groups = {root.slice_ranks(rank, (d,)) for rank in root.ranks for d in (0, 1)}
    with small_buckets(7):
        outcomes = World(6, groups | {root.ranks}).run(step)
    assert [outcome.get() for outcome in outcomes] == [pytest.approx([math.sqrt(8)] * 2)] * 6


def test_what_was_learnt_as_another_stage_is_not_taken_for_true() -> None:
    """Rank 0 alone holds the key as the first stage, then rank 1 alone as the first stage, then both."""

    def step(rank: int) -> list[float]:
        norms = []
        for ranks, holders in (((0, 1), {0}), ((1, 0), {1}), ((0, 1), {0, 1})):
            held = [Parameter(np.ones(4), np.ones(4).view(Tensor)) for _ in holders & {rank}]
            for parameter in held:
                hyper_parallel.mark_shared(parameter, "emb")
            norms.append(float(hyper_parallel.clip_grad_norm_(held, 0.1, pp_mesh=Mesh((2,), ranks))))
        return norms

    with small_buckets(7):
        assert World(2).values(step) == [pytest.approx([2.0, 2.0, 2.0])] * 2


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("rooted", [False, True])
@pytest.mark.parametrize("odd", [Replicate(), Partial()])
def test_ranks_of_one_stage_that_clip_different_tensors(
    rooted: bool, waits: bool, odd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumpyMath, "waits", waits)
    with small_buckets(7):
        models = [[graded(rank, rooted, odd if rank == 1 else None)] for rank in range(4)]
        outcomes = clip(models, rooted)
    for outcome in outcomes:
        assert isinstance(outcome.error, RuntimeError)
        assert "the ranks clip different tensors" in str(outcome.error)
    assert all((parameter.grad == 1).all() for model in models for parameter in model)


@LINKS
def test_a_parameter_that_only_one_stage_uses_costs_no_further_collective_in_a_stage(rooted: bool) -> None:
    with small_buckets(7):
        models = [[graded(rank, rooted, Replicate()), graded(rank, rooted)] for rank in range(4)]
        models[0][0].grad = models[1][0].grad = None
        outcomes = clip(models, rooted)
    assert [outcome.get() for outcome in outcomes] == [pytest.approx(math.sqrt(12))] * 4

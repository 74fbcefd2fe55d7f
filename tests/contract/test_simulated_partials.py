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
from hyper_parallel.interface import LAYOUT_ATTRIBUTE
from tests.contract.numpy_platform import NumpyMath, Parameter, Tensor
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
    pytest.mark.filterwarnings("ignore:divide by zero"),
    pytest.mark.filterwarnings("ignore:no tensor carries a gradient"),
]

ORDERS = st.sampled_from([2.0, 1.0, 0.5, 0.0, -1.0, math.inf, -math.inf])
bounded = settings(
    max_examples=80,
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
        partials = [spec for spec in case.specs if isinstance(spec, Terms)]
        lines = [[line for line, _ in spec.lines(rank) if len(line) > 1] for spec in partials]
        assert {call.ranks for call in scatters} <= {line for found in lines for line in found}
        assert all(call.what[2][0] < case.bucket + case.world_size for call in scatters)
        buckets = [math.ceil(spec.gradient(rank).size / case.bucket) for spec in partials]
        assert len(scatters) <= sum(len(found) * number for found, number in zip(lines, buckets, strict=True))
        if not any(lines):
            assert len(outcome.calls) <= 1 or not case.united


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


# ---- worked examples


def graded(layout: Layout | None, rank: int, value: Any = 1.0, size: int = 4) -> Parameter:
    shape = (size,) if layout is None else layout.local_shape(rank)
    parameter = Parameter(np.ones(shape), np.full(shape, value).view(Tensor))
    if layout is not None:
        setattr(parameter, LAYOUT_ATTRIBUTE, layout)
    return parameter


def clip(
    models: list[list[Parameter]], meshes: list[Mesh], p: float = 2.0, max_norm: float = 0.1
) -> list[Any]:
    size = len(models)
    lines = {
        tuple(sorted(m.slice_ranks(rank, (d,)))) for m in meshes for rank in m.ranks for d in range(m.ndim)
    }
    world = World(size, lines | {tuple(range(size))})
    return world.run(lambda rank: float(hyper_parallel.clip_grad_norm_(models[rank], max_norm, p)))


def assert_all_raise(outcomes: list[Any], kind: type[Exception], *words: str) -> None:
    assert {type(outcome.error) for outcome in outcomes} == {kind}, [o.error or o.value for o in outcomes]
    assert all(word in str(outcome.error) for outcome in outcomes for word in words)


@pytest.mark.parametrize("first", OPS)
@pytest.mark.parametrize("second", OPS)
def test_a_whole_line_without_gradient_is_the_identity_of_the_op_that_follows(
    first: str, second: str
) -> None:
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    layout = Layout(mesh, (Partial(first), Partial(second)), (4,))
    models = [[graded(layout, rank, -3.0)] for rank in range(4)]
    for rank in (1, 3):  # one line of the first mesh dim
        models[rank][0].grad = None
    halved = {"sum": 2.0, "avg": 1.0}.get(first, 1.0) * {"avg": 0.5}.get(second, 1.0)
    assert [o.get() for o in clip(models, [mesh], math.inf)] == [pytest.approx(3 * halved)] * 4


def test_slices_of_sister_lines_fit_where_the_mesh_is_not_in_rank_order() -> None:
    mesh = Mesh((3, 2), (1, 5, 0, 3, 4, 2))
    layout = Layout(mesh, (Partial("sum"), Partial("sum")), (6,))
    models = [[graded(layout, rank, np.arange(6.0))] for rank in range(6)]
    outcomes = clip(models, [mesh], -math.inf)
    models = [[graded(layout, rank, np.arange(1.0, 7.0))] for rank in range(6)]
    assert [o.get() for o in outcomes] == [0.0] * 6
    assert [o.get() for o in clip(models, [mesh], -math.inf)] == [pytest.approx(6.0)] * 6


def test_two_meshes_with_the_same_lines_on_some_ranks_only() -> None:
    meshes = [Mesh((2, 3), (0, 1, 2, 3, 4, 5)), Mesh((2, 3), (0, 1, 2, 3, 5, 4))]
    models = [
        [graded(Layout(mesh, (Partial(), Partial()), (4,)), rank) for mesh in meshes] for rank in range(6)
    ]
    assert [o.get() for o in clip(models, meshes)] == [pytest.approx(math.sqrt(8 * 36))] * 6


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("op", OPS)
def test_an_error_on_one_rank_is_raised_everywhere_and_before_any_reduction(
    op: str, step: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumpyMath, "waits", waits)
    mesh = Mesh((3,), (0, 1, 2))
    layout = Layout(mesh, (Partial(op),), (4,))
    models = [[graded(layout, rank), graded(None, rank)] for rank in range(3)]
    for _ in range(step - 1):
        assert all(o.error is None for o in clip(models, [mesh], max_norm=math.inf))
    models[1] = [graded(layout, 1), graded(None, 1)]
    models[1][0].grad = np.ones(5).view(Tensor)
    outcomes = clip(models, [mesh])
    assert_all_raise(outcomes, ValueError, "rank 1: tensor 0", "(5,)")
    assert all((q.grad == 1).all() for model in models for q in model)


@pytest.mark.parametrize("other", [Partial("max"), Partial("avg"), Replicate(), None])
def test_ranks_that_disagree_about_a_partial_tensor(other: Any) -> None:
    mesh = Mesh((3,), (0, 1, 2))
    layouts = [
        Layout(mesh, (Partial("sum") if rank != 1 else other,), (4,)) if rank != 1 or other else None
        for rank in range(3)
    ]
    models = [
        [graded(layouts[rank], rank), graded(Layout(mesh, (Replicate(),), (2,)), rank)] for rank in range(3)
    ]
    assert_all_raise(clip(models, [mesh]), RuntimeError, "the ranks clip different tensors", "tensor 0")
    assert all((q.grad == 1).all() for model in models for q in model)


def test_a_gradient_on_some_copies_only_is_refused_on_every_rank() -> None:
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    layout = Layout(mesh, (Replicate(), Partial("sum")), (4,))
    models = [[graded(layout, rank)] for rank in range(4)]
    models[0][0].grad = models[1][0].grad = None
    assert_all_raise(clip(models, [mesh]), ValueError, "has a gradient on some copies only")


@pytest.mark.parametrize("op", ["sum", "max"])
def test_an_expanded_partial_gradient_is_refused_on_every_rank(op: str) -> None:
    mesh = Mesh((3,), (0, 1, 2))
    models = [[graded(Layout(mesh, (Partial(op),), (4,)), rank), graded(None, rank)] for rank in range(3)]
    models[1][0].grad = np.broadcast_to(np.ones(1), (4,)).view(Tensor)
    outcomes = clip(models, [mesh])
    assert_all_raise(outcomes, ValueError, "rank 1", "expanded")
    assert all((q.grad == 1).all() for model in models for q in model)

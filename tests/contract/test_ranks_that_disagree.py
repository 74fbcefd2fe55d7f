"""One rank is wrong or different: every rank learns of it, raises the same, and no gradient has changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import hyper_parallel
from hyper_parallel import Layout, Mesh, Replicate, Shard, StridedShard
from hyper_parallel.interface import LAYOUT_ATTRIBUTE
from tests.contract.numpy_platform import Parameter, Tensor
from tests.contract.numpy_world import Call, CollectiveError, Outcome, World, current_world

pytestmark = pytest.mark.usefixtures("numpy_ranks")


def parameter(shape: tuple[int, ...], layout: Layout | None = None, value: float = 1.0) -> Parameter:
    """A parameter whose gradient is ``value`` everywhere."""
    built = Parameter(np.ones(shape), np.full(shape, value).view(Tensor))
    if layout is not None:
        setattr(built, LAYOUT_ATTRIBUTE, layout)
    return built


def sharded(size: int, rows: tuple[int, ...], placement: Any = None, rank: int = 0) -> Parameter:
    """A parameter of shape ``rows`` on all ``size`` ranks, Shard(0) unless said otherwise."""
    layout = Layout(Mesh((size,), tuple(range(size)), ("dp",)), (placement or Shard(0),), rows)
    return parameter(layout.local_shape(rank), layout)


def clip(models: Sequence[Any], **arguments: Any) -> list[Outcome]:
    world = World(len(models))
    return world.run(lambda rank: hyper_parallel.clip_grad_norm_(models[rank], 0.1, **arguments))


def assert_all_raise(outcomes: Sequence[Outcome], kind: type[Exception], *words: str) -> None:
    messages = {str(outcome.error) for outcome in outcomes}
    assert [type(outcome.error) for outcome in outcomes] == [kind] * len(outcomes), messages
    assert len(messages) == 1, messages
    for word in words:
        assert word in next(iter(messages))


def assert_untouched(models: Sequence[Any], value: float = 1.0) -> None:
    for model in models:
        members = model.values() if isinstance(model, dict) else model
        assert all((member.grad == value).all() for member in members)


# ---- different lists of tensors

Build = Callable[[int, int], list[Parameter]]


def ordinary(rank: int, size: int) -> list[Parameter]:
    return [sharded(size, (8, 2), rank=rank), sharded(size, (6,), rank=rank), parameter((3,))]


DIFFERENCES: dict[str, tuple[Build, tuple[str, ...]]] = {
    "another shape": (
        lambda rank, size: [
            sharded(size, (8, 2), rank=rank),
            sharded(size, (5,), rank=rank),
            parameter((3,)),
        ],
        ("tensor 1: shape (6,)", "tensor 1: shape (5,)"),
    ),
    "an extra parameter": (
        lambda rank, size: [*ordinary(rank, size), parameter((7,))],
        ("no further tensor", "tensor 3: shape (7,)"),
    ),
    "a parameter less": (
        lambda rank, size: ordinary(rank, size)[:2],
        ("tensor 2: shape (3,), replicated", "no further tensor"),
    ),
    "another placement": (
        lambda rank, size: [sharded(size, (8, 2), Replicate(), rank), *ordinary(rank, size)[1:]],
        ("tensor 0: shape (8, 2), (Shard(dim=0),)", "(Replicate(),)"),
    ),
    "another dim": (
        lambda rank, size: [sharded(size, (8, 2), Shard(1), rank), *ordinary(rank, size)[1:]],
        ("Shard(dim=0)", "Shard(dim=1)"),
    ),
    "another split factor": (
        lambda rank, size: [
            sharded(size, (8, 2), StridedShard(0, split_factor=2), rank),
            *ordinary(rank, size)[1:],
        ],
        ("Shard(dim=0)", "StridedShard(dim=0, split_factor=2)"),
    ),
    "another order": (
        lambda rank, size: [ordinary(rank, size)[i] for i in (1, 0, 2)],
        ("tensor 0: shape (8, 2)", "tensor 0: shape (6,)"),
    ),
    "a layout where others have none": (
        lambda rank, size: [*ordinary(rank, size)[:2], sharded(size, (3,), Replicate(), rank)],
        ("tensor 2: shape (3,), replicated", "(Replicate(),) on mesh {'dp':"),
    ),
}


@pytest.mark.parametrize("p", [2.0, 0.0, math.inf, -math.inf])
@pytest.mark.parametrize(("size", "odd"), [(2, 1), (3, 0), (4, 2), (4, 3)])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_rank_that_clips_other_tensors(difference: str, size: int, odd: int, p: float) -> None:
    build, words = DIFFERENCES[difference]
    models = [(build if rank == odd else ordinary)(rank, size) for rank in range(size)]
    outcomes = clip(models, norm_type=p)
    assert_all_raise(
        outcomes, RuntimeError, "the ranks clip different tensors", f"rank {odd}" if odd else "rank 0"
    )
    assert all(word in str(outcomes[0].error) for word in words)
    assert_untouched(models)


def test_other_names_are_a_difference() -> None:
    models = [{("a", "b")[rank]: sharded(2, (4,), rank=rank)} for rank in range(2)]
    assert_all_raise(clip(models), RuntimeError, "rank 0 has a: shape (4,)", "rank 1 has b: shape (4,)")
    assert_untouched(models)


def test_a_frozen_parameter_on_one_rank_only_is_a_difference() -> None:
    models = [[sharded(2, (4,), rank=rank), parameter((3,))] for rank in range(2)]
    models[1][1].requires_grad = False
    assert_all_raise(clip(models), RuntimeError, "tensor 1: shape (3,), replicated", "no further tensor")


def test_after_a_difference_the_same_ranks_can_clip_again() -> None:
    world, odd = World(2), DIFFERENCES["another shape"][0]
    wrong = [ordinary(0, 2), odd(1, 2)]
    right = [ordinary(rank, 2) for rank in range(2)]

    def both(rank: int) -> float:
        with pytest.raises(RuntimeError, match="different tensors"):
            hyper_parallel.clip_grad_norm_(wrong[rank], 1.0)
        return float(hyper_parallel.clip_grad_norm_(right[rank], 1.0))

    assert world.values(both) == [pytest.approx(math.sqrt(16 + 6 + 3))] * 2


# ---- errors on one rank


@pytest.mark.parametrize("p", [2.0, math.inf])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_local_tensor_that_does_not_fit_its_layout(culprit: int, p: float) -> None:
    models = [ordinary(rank, 3) for rank in range(3)]
    bad = sharded(3, (8, 2), rank=culprit)
    bad.grad = np.ones((5, 2)).view(Tensor)
    models[culprit][0] = bad
    outcomes = clip(models, norm_type=p)
    assert_all_raise(outcomes, ValueError, f"rank {culprit}: tensor 0", "(5, 2)", str(bad.data.shape))
    assert_untouched(models)


def test_two_ranks_with_errors_are_both_named() -> None:
    models = [[sharded(3, (9,), rank=rank)] for rank in range(3)]
    for rank in (0, 2):
        models[rank][0].grad = np.ones(4 + rank).view(Tensor)
    assert_all_raise(clip(models), ValueError, "rank 0: tensor 0", "(4,)", "rank 2: tensor 0", "(6,)")


def test_a_gradient_that_cannot_be_scaled_in_place_on_one_rank() -> None:
    models = [[sharded(2, (4,), rank=rank), parameter((3,))] for rank in range(2)]
    models[1][1].grad = np.broadcast_to(np.ones(1), (3,))
    assert_all_raise(clip(models), ValueError, "rank 1", "expanded")
    assert_untouched(models)


@pytest.mark.parametrize("p", [2.0, math.inf])
@pytest.mark.parametrize("size", [1, 3])
def test_gradients_that_are_too_many_on_one_rank(size: int, p: float) -> None:
    models = [ordinary(rank, size) for rank in range(size)]
    grads = [[member.grad for member in model] for model in models]
    grads[-1].append(grads[-1][0])
    outcomes = World(size).run(
        lambda rank: hyper_parallel.clip_grad_norm_(models[rank], 0.1, p, grads=grads[rank])
    )
    assert_all_raise(outcomes, ValueError, f"rank {size - 1}: " * (size > 1) + "4 gradients for 3 parameters")
    assert_untouched(models)


@pytest.mark.parametrize("bad", [math.nan, -1.0])
def test_a_max_norm_that_is_wrong_on_one_rank(bad: float) -> None:
    models = [ordinary(rank, 3) for rank in range(3)]
    outcomes = World(3).run(
        lambda rank: hyper_parallel.clip_grad_norm_(models[rank], bad if rank == 1 else 0.1)
    )
    assert_all_raise(
        outcomes, ValueError, f"rank 1: max_norm must be at least 0 (inf only measures), got {bad}"
    )
    assert_untouched(models)


def test_an_unknown_kind_of_error_is_raised_as_runtime_error_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    platform = hyper_parallel.get_platform()
    original = platform.statistic

    def failing(tensors: Any, kind: Any, foreach: Any) -> Any:
        if platform.rank() == 1:
            raise ZeroDivisionError("a mistake in the adapter")
        return original(tensors, kind, foreach)

    monkeypatch.setattr(platform, "statistic", failing, raising=True)
    models = [[sharded(3, (9,), rank=rank)] for rank in range(3)]
    assert_all_raise(clip(models), RuntimeError, "rank 1: a mistake in the adapter")
    assert_untouched(models)


def test_foreach_true_without_kernels_raises_everywhere() -> None:
    models = [ordinary(rank, 2) for rank in range(2)]
    assert_all_raise(clip(models, foreach=True), RuntimeError, "foreach=True")
    assert_untouched(models)


# ---- values


@pytest.mark.parametrize("p", [2.0, 1.0, math.inf, -math.inf])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_nan_in_one_copy_of_a_replicated_gradient(culprit: int, p: float) -> None:
    models = [[sharded(3, (4,), Replicate(), rank)] for rank in range(3)]
    models[culprit][0].grad[2] = math.nan
    outcomes = clip(models, norm_type=p)
    assert all(math.isnan(outcome.get()) for outcome in outcomes)
    assert all(np.isnan(model[0].grad).all() for model in models)


def test_nan_in_one_copy_of_a_plain_gradient_beside_a_sharded_one() -> None:
    models = [ordinary(rank, 2) for rank in range(2)]
    models[1][2].grad[0] = math.nan
    assert all(math.isnan(outcome.get()) for outcome in clip(models))


def test_copies_that_differ_still_give_the_same_norm_on_every_rank() -> None:
    models = [[sharded(3, (4,), Replicate(), rank)] for rank in range(3)]
    for rank, model in enumerate(models):
        model[0].grad *= rank + 1
    outcomes = clip(models)
    assert len({np.asarray(outcome.get()).tobytes() for outcome in outcomes}) == 1


def test_error_if_nonfinite_names_the_tensor_and_its_ranks_everywhere() -> None:
    models = [ordinary(rank, 3) for rank in range(3)]
    models[1][1].grad[0] = math.inf
    models[2][2].grad[:] = math.nan
    outcomes = clip(models, error_if_nonfinite=True)
    assert_all_raise(outcomes, RuntimeError, "tensor 1 (ranks [1])", "tensor 2 (ranks [2])")
    assert all((model[0].grad == 1).all() for model in models)


# ---- the simulated ranks themselves


def test_a_collective_that_a_rank_does_not_enter_fails_with_who_waits_where() -> None:
    world = World(2)
    platform = hyper_parallel.get_platform()
    outcomes = world.run(lambda rank: rank or platform.all_reduce(np.ones(3), "sum", (0, 1)))
    assert isinstance(outcomes[0].error, CollectiveError)
    assert "rank 0 waits in" in str(outcomes[0].error)
    assert "ended: [1]" in str(outcomes[0].error)
    assert outcomes[1].get() == 1


@pytest.mark.parametrize("other", [("max", 3), ("sum", 4)])
def test_different_collectives_that_meet_fail_on_both_ranks(other: tuple[str, int]) -> None:
    platform = hyper_parallel.get_platform()
    calls = [("sum", 3), other]
    outcomes = World(2).run(lambda rank: platform.all_reduce(np.ones(calls[rank][1]), calls[rank][0], (0, 1)))
    assert all("different collectives meet" in str(outcome.error) for outcome in outcomes)


def test_ranks_that_wait_for_each_other_in_different_groups_fail() -> None:
    world, order = World(3, [(0, 1), (1, 2), (0, 2)]), [(0, 1), (1, 2), (0, 2)]
    platform = hyper_parallel.get_platform()
    outcomes = world.run(lambda rank: platform.all_gather_object(rank, order[rank]))
    assert all("no rank can go on" in str(outcome.error) for outcome in outcomes)


def test_a_group_that_does_not_exist_fails() -> None:
    outcomes = World(2, [(0, 1)]).run(lambda rank: current_world().meet(Call(("x",), (rank,)), None, list))
    assert all("has no process group of ranks" in str(outcome.error) for outcome in outcomes)

"""The staged norm on real ranks, in terms that every backend understands; each function runs on every rank."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np

import hyper_parallel as hp
from hyper_parallel import Mesh, Partial, Replicate, Shard, StridedShard
from tests.parity.public_cases import mesh, number, parameter, raised, values

SHAPES = ((8, 3), (6, 4), (5,), (3,), (4,))


def gradients() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def model() -> tuple[list[Any], Any]:
    """A column- and a row-wise weight under FSDP, a bias that tp replicates, a plain tensor, a Partial one."""
    grid = mesh(2, 2, names=("dp", "tp"))
    whole, rank = gradients(), hp.get_platform().rank()
    dp, tp = divmod(rank, 2)
    placed = [
        (whole[0][4 * tp + 2 * dp :][:2], grid, [StridedShard(0, split_factor=2), Shard(0)]),
        (whole[1][3 * dp :][:3, 2 * tp : 2 * tp + 2], grid, [Shard(0), Shard(1)]),
        (whole[2][3 * dp :][:3], grid["dp"], [Shard(0)]),
        (whole[3], None, ()),
        (whole[4] * (0.25, 0.75)[tp], grid, [Replicate(), Partial()]),
    ]
    made = [
        parameter(local, where, placements, shape)
        for (local, where, placements), shape in zip(placed, SHAPES, strict=True)
    ]
    return made, SimpleNamespace(device_mesh=grid)


def whole_model(excluded: list[str]) -> Any:
    """The squared norm, the gradients after scaling by one half, and the plan."""
    made, context = model()
    plan = pickle.loads(pickle.dumps(hp.build_norm_shard_plan(made, excluded, context)))
    assert hp.build_norm_shard_plan(made, excluded, context, trust_layouts=True) == plan
    before = values(made)
    results = [hp.dense_grad_norm_sq_and_refs(made, excluded, plan, context) for _ in range(2)]
    (norm_sq, refs), (again, _) = results
    hp.scale_grad_refs_(refs, 0.5)
    return number(norm_sq), number(again), before, values(made), len(refs), plan


def main_grad_counts() -> Any:
    made = [parameter([1.0, 2.0], mesh(2), [Replicate()])]
    made[0].main_grad = parameter([3.0, 4.0]).grad
    plan = hp.build_norm_shard_plan(made)
    norm_sq, refs = hp.dense_grad_norm_sq_and_refs(made, (), plan)
    hp.scale_grad_refs_(refs, 0.5)
    after = hp.get_platform().to_numpy(made[0].main_grad)
    return number(norm_sq), after, values(made)[0]


def broken(what: str) -> Any:
    """Rank 1 says something that does not fit; what building the plan raises."""
    odd = hp.get_platform().rank() == 1
    world = mesh(2)
    made = [parameter([1.0, 2.0], world, [Shard(0)], (4,)), parameter([1.0])]
    if what == "fqns" and odd:
        made.append(parameter([5.0]))
    if what == "shapes" and odd:
        made[0] = parameter([1.0, 2.0, 3.0], world, [Shard(0)], (6,))
    if what == "hole" and odd:
        made[0] = parameter([1.0, 2.0], Mesh((2,), (1, 0)), [Shard(0)], (4,))
    if what == "overlap" and odd:
        made[0] = parameter([1.0, 2.0, 3.0, 4.0], world, [Replicate()], (4,))
    trusting = raised(lambda: hp.build_norm_shard_plan(made, trust_layouts=True))
    error = raised(lambda: hp.build_norm_shard_plan(made))
    assert (
        trusting == error or what == "hole"
    )  # equal layouts on meshes in another order are what they say they are
    return error


def local_tensor_that_misfits() -> Any:
    made = [parameter([1.0, 2.0], mesh(2), [Shard(0)], (4,))]
    if hp.get_platform().rank() == 1:
        made[0].hyper_parallel_layout = hp.get_platform().layout(mesh(2), [Shard(0)], (6,))
    return raised(lambda: hp.build_norm_shard_plan(made))


def missing_on_some_copies() -> Any:
    made = [parameter([3.0, 4.0], mesh(2), [Replicate()]), parameter([1.0], mesh(2), [Shard(0)], (2,))]
    plan = hp.build_norm_shard_plan(made)
    first = number(hp.dense_grad_norm_sq_and_refs(made, (), plan)[0])
    if hp.get_platform().rank() == 1:
        made[0].grad = None
    error = raised(lambda: hp.dense_grad_norm_sq_and_refs(made, (), plan))
    made[0].grad = None
    return first, error, number(hp.dense_grad_norm_sq_and_refs(made, (), plan)[0]), values(made)[1]


def not_in_the_plan() -> Any:
    made = [parameter([1.0], mesh(2), [Replicate()]), parameter([2.0])]
    plan = hp.build_norm_shard_plan(made, [made[1]])
    return raised(lambda: hp.dense_grad_norm_sq_and_refs(made, (), plan))


def stages() -> Any:
    """2 stages of 2 ranks: each has a sharded tensor of its own."""
    grid = mesh(2, 2, names=("pp", "dp"))
    rank = hp.get_platform().rank()
    made = [parameter([rank + 1.0], grid["dp"], [Shard(0)], (2,))]
    context = SimpleNamespace(device_mesh=grid["dp"])
    plan = hp.build_norm_shard_plan(made, (), context)
    norm_sq, _ = hp.dense_grad_norm_sq_and_refs(made, (), plan, context)
    return number(norm_sq), number(hp.combine_pipeline_norm_sq(norm_sq, grid["pp"]))


def partial_missing_on_one_copy() -> Any:
    grid = mesh(2, 2)
    made = [parameter([1.0, 1.0], grid, [Replicate(), Partial()])]
    plan = hp.build_norm_shard_plan(made)
    first = number(hp.dense_grad_norm_sq_and_refs(made, (), plan)[0])
    if hp.get_platform().rank() == 2:
        made[0].grad = None  # its partner in the sum has one: the identity stands for it
    term = number(hp.dense_grad_norm_sq_and_refs(made, (), plan)[0])
    if hp.get_platform().rank() < 2:
        made[0].grad = None
    return first, term, raised(lambda: hp.dense_grad_norm_sq_and_refs(made, (), plan))


def other_layout_than_planned() -> Any:
    made = [parameter([1.0, 1.0], mesh(2), [Shard(0)], (4,))]
    plan = hp.build_norm_shard_plan(made)
    hp.attach_layout(made[0], mesh(2), [Replicate()])
    return raised(lambda: hp.dense_grad_norm_sq_and_refs(made, (), plan))


def collectives_of_a_plan(trust_layouts: bool) -> list[str]:
    """Which collectives building a plan takes, by the platform's methods."""
    made, context = model()
    platform = hp.get_platform()
    called = []
    reduce, gather = platform.all_reduce, platform.all_gather_object
    platform.all_reduce = lambda *args: (called.append("all_reduce"), reduce(*args))[1]
    platform.all_gather_object = lambda *args: (called.append("all_gather_object"), gather(*args))[1]
    try:
        hp.build_norm_shard_plan(made, (), context, trust_layouts=trust_layouts)
    finally:
        del platform.all_reduce, platform.all_gather_object
    return called


def outside_of_a_mesh() -> Any:
    """Rank 1 is not on the mesh of a parameter, by its own account."""
    made = [parameter([1.0, 2.0], mesh(2), [Shard(0)], (4,)), parameter([1.0])]
    if hp.get_platform().rank() == 1:
        hp.attach_layout(made[1], Mesh((1,), (0,)), [Shard(0)], (1,))
    return raised(lambda: hp.build_norm_shard_plan(made))

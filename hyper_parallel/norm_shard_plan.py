"""The pieces of clipping, for trainers that keep some parameters to themselves.

Such a trainer has parameters that this library does not see (host-resident tables, an external optimizer, a second
framework). It takes the squared norm of the dense ones, adds its own, and scales:

    plan = build_norm_shard_plan(model, excluded_params=["table"], mesh_context=context)       # once
    norm_sq, refs = dense_grad_norm_sq_and_refs(model, ["table"], plan, context)               # in each step
    norm_sq = combine_pipeline_norm_sq(norm_sq + own_norm_sq, pp_mesh)
    scale_grad_refs_(refs, (max_norm / (norm_sq.sqrt() + 1e-6)).clamp(max=1))                  # torch's formula

The plan is not derived from what layouts promise, but from what all ranks say they hold: their areas are gathered
once and must cover every tensor exactly, and of equal areas one rank counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel import wire
from hyper_parallel.core.coverage import LocalShard, Table, layout_digest, local_shard, verify_coverage
from hyper_parallel.core.layout import Area
from hyper_parallel.core.norm import NormKind
from hyper_parallel.core.plan import Part, ReductionPlan, TensorMeta
from hyper_parallel.core.staged import layout_replicas, staged_part
from hyper_parallel.core.union import Ranks, Union, mesh_union
from hyper_parallel.execution import Request, total_statistic
from hyper_parallel.failures import gather
from hyper_parallel.interface import Platform, Tensor
from hyper_parallel.platforms import get_platform
from hyper_parallel.preparation import Prepared, prepare


@dataclass(frozen=True)
class NormShardPlan:
    """Who counts what, by FQN, as seen from one rank. Can be pickled; the mappings are not to be changed.

    Attributes:
        representatives: whether this rank counts its shard, as the smallest of those that hold the same.
        replica_ranks: the ranks that hold the same areas as this one, ascending, itself included.
        areas: what this rank holds.
    """

    representatives: Mapping[str, bool]
    replica_ranks: Mapping[str, Ranks]
    areas: Mapping[str, tuple[Area, ...]]


def build_norm_shard_plan(
    model: Any, excluded_params: Iterable[Any] = (), mesh_context: Any = None, *, trust_layouts: bool = False
) -> NormShardPlan:
    """Gather who holds what, check that it covers every tensor exactly, and choose who counts.

    Args:
        model: a module or cell, or an iterable of tensors, which are then named by their position.
        excluded_params: FQNs or parameters that the caller counts by itself.
        mesh_context: anything with a ``device_mesh``, whose ranks are this pipeline stage; None: all ranks.
        trust_layouts: if all ranks have the same layouts, and local tensors that fit them, believe that they hold
            what these say: for very large jobs, where tables of all ranks are too much to gather.

    Raises:
        ValueError: on every rank of the stage, with all errors: other FQNs or global shapes on some ranks, holes,
            overlaps, areas out of bounds, a local tensor that is not what its layout says, a rank outside its mesh.

    Collectives: one gather of a table per rank over the stage; with ``trust_layouts`` one all-reduce of 49 numbers,
    and the gather only if it shows a difference.
    """
    platform = get_platform()
    stage = _stage(platform, mesh_context)
    prepared = _dense(model, excluded_params)
    rank = platform.rank()
    shards = {meta.name: _held(meta, rank) for meta in prepared.tensors}
    for error in prepared.errors:
        name = str(error).partition(":")[0]
        shards[name] = replace(shards[name], problem=str(error))
    replica_ranks = _analytic(platform, prepared, stage) if trust_layouts else None
    if replica_ranks is None:
        replica_ranks = _verified(platform, Table.of(shards), stage)
    representatives = {fqn: ranks[0] == rank for fqn, ranks in replica_ranks.items()}
    return NormShardPlan(representatives, replica_ranks, {fqn: shard.areas for fqn, shard in shards.items()})


def dense_grad_norm_sq_and_refs(
    model: Any, excluded_params: Iterable[Any], norm_shard_plan: NormShardPlan, mesh_context: Any = None
) -> tuple[Tensor, list[Tensor]]:
    """The squared L2 norm of a stage's dense gradients, and the gradients to scale.

    Args:
        model, excluded_params, mesh_context: as for ``build_norm_shard_plan``.
        norm_shard_plan: what that returned on this rank.

    Returns:
        A 0-d float32 tensor, the same bits on every rank of the stage, and this rank's local gradients in the
        order of the parameters: they share memory with what the optimizer will read (``main_grad`` where there is
        one, else ``grad``; the local tensor of a DTensor).

    Raises:
        ValueError: on every rank, if a parameter is not in the plan or lies otherwise than there, a local tensor is
            not what its layout says, a gradient cannot be scaled in place, or some copies of a shard have a gradient
            and others have none.

    Collectives: one all-reduce over the stage; Partial gradients as in ``clip_grad_norm_``.
    """
    platform = get_platform()
    stage = _stage(platform, mesh_context)
    prepared = _dense(model, excluded_params)
    part = _part(prepared.tensors, platform.rank(), stage, norm_shard_plan)
    request = Request(
        platform,
        NormKind(2),
        prepared.gradients,
        prepared.anchor,
        errors=(*prepared.errors, *_unwritable(prepared)),
        first_use=prepared.first_use,
    )
    plan = ReductionPlan((part,))
    norm_sq = platform.cast(total_statistic(plan, request), None, prepared.anchor)
    return norm_sq, list(prepared.present)


def combine_pipeline_norm_sq(norm_sq: Tensor, pp_mesh: Any) -> Tensor:
    """The sum of the squared norms of all pipeline stages, as a 0-d float32 tensor.

    A parameter that several stages hold counts on each of them: exclude it on all but one.

    Collectives: one all-reduce of one number over ``pp_mesh``, or one per mesh dim.
    """
    platform = get_platform()
    stages = mesh_union(platform.mesh(pp_mesh), platform.rank(), platform.groups())
    buffer = platform.pack([platform.cast(norm_sq, None, norm_sq)], norm_sq)
    for ranks in stages.steps:
        buffer = platform.all_reduce(buffer, "sum", ranks)
    return platform.cast(buffer[0], None, norm_sq)


def scale_grad_refs_(refs: Sequence[Tensor], coefficient: Tensor | float) -> None:
    """Multiply gradients in place by a coefficient, in float32; ``refs`` that share memory are scaled once."""
    if refs:
        platform = get_platform()
        platform.scale_(refs, platform.cast(coefficient, None, refs[0]), None)


def _dense(model: Any, excluded_params: Iterable[Any]) -> Prepared:
    excluded = list(excluded_params)
    fqns, objects = {each for each in excluded if isinstance(each, str)}, {id(each) for each in excluded}
    parameters, names = get_platform().parameters(model)
    names = list(names) or [f"tensor {index}" for index in range(len(parameters))]
    kept = {
        name: parameter
        for name, parameter in zip(names, parameters, strict=True)
        if name not in fqns and id(parameter) not in objects
    }
    return prepare(list(kept.values()), None, names=list(kept))


def _stage(platform: Platform, mesh_context: Any) -> Union:
    """The ranks that hold the parameters of this stage."""
    rank, groups = platform.rank(), platform.groups()
    if mesh_context is not None:
        return mesh_union(platform.mesh(mesh_context.device_mesh), rank, groups)
    world = max(groups, key=len, default=(rank,))
    return Union(world, (world,) if len(world) > 1 else ())


def _analytic(platform: Platform, prepared: Prepared, stage: Union) -> dict[str, Ranks] | None:
    """Who holds copies, from layouts alone; None on every rank if they differ or do not tell on some rank."""
    found = layout_replicas(prepared.tensors, platform.rank(), stage.ranks)
    named = zip(prepared.tensors, found, strict=True)
    replicas = {meta.name: ranks for meta, ranks in named if ranks is not None}
    unsure = bool(prepared.errors) or len(replicas) < len(prepared.tensors)
    digest = 0 if unsure else layout_digest(prepared.tensors, stage.ranks)
    buffer = platform.pack([float(unsure), *wire.bits(digest)], prepared.anchor)
    for ranks in stage.steps:
        buffer = platform.all_reduce(buffer, "max", ranks)
    reduced = platform.read(buffer, True) or [1.0]
    return None if reduced[0] > 0 or wire.disagree(reduced, 1) else replicas


def _verified(platform: Platform, table: Table, stage: Union) -> dict[str, Ranks]:
    """Who holds copies, from the tables of all ranks."""
    tables = {rank: Table.received(data) for rank, data in gather(platform, stage.steps, table.sent())}
    shards = verify_coverage(tables, stage.ranks)
    return {fqn: shards[fqn][record] for fqn, record in zip(table.fqns, table.records, strict=True)}


def _held(meta: TensorMeta, rank: int) -> LocalShard:
    if meta.layout is not None:
        return local_shard(meta.layout, rank)
    return LocalShard(meta.global_shape, (Area((0,) * len(meta.global_shape), meta.global_shape),))


# By the identity of a plan and of a tensor list, both kept alive here: no per-parameter work in the steady state.
_parts: dict[tuple[int, int], tuple[NormShardPlan, Sequence[TensorMeta], Part]] = {}
_MAX_PARTS = 16


def _part(tensors: tuple[TensorMeta, ...], rank: int, stage: Union, plan: NormShardPlan) -> Part:
    key = (id(plan), id(tensors))
    if key not in _parts:
        errors = tuple(error for meta in tensors for error in _strays(meta, rank, plan))
        held = tuple(plan.replica_ranks.get(meta.name, ()) for meta in tensors)
        while len(_parts) >= _MAX_PARTS:
            _parts.pop(next(iter(_parts)), None)
        _parts[key] = plan, tensors, staged_part(tensors, rank, stage, held, errors)
    return _parts[key][2]


def _strays(meta: TensorMeta, rank: int, plan: NormShardPlan) -> Iterable[str]:
    if meta.name not in plan.areas:
        yield f"{meta.name} is not in the NormShardPlan"
    elif plan.areas[meta.name] != _held(meta, rank).areas:
        yield f"{meta.name} lies otherwise than when the NormShardPlan was built: {meta}"


def _unwritable(prepared: Prepared) -> Iterable[Exception]:
    try:
        prepared.platform.check_in_place(
            [gradient for gradient in prepared.gradients if gradient is not None]
        )
    except (TypeError, ValueError) as error:
        yield error

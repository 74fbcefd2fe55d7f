"""From what the caller passes to a plan and local gradients; what does not change between steps is kept."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.plan import ReductionPlan, TensorMeta, build_plan
from hyper_parallel.core.union import Groups
from hyper_parallel.interface import SHARED_ATTRIBUTE, Description, Platform, Tensor
from hyper_parallel.platforms import get_platform

_MAX_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class Prepared:
    """One call: the plan, this rank's local gradients in plan order, and what is wrong on this rank.

    ``present`` are the gradients that are not missing. ``anchor`` is the first parameter: its device is that of the buffer, even on ranks that have no gradient.
    """

    platform: Platform
    plan: ReductionPlan
    tensors: tuple[TensorMeta, ...]
    gradients: Sequence[Tensor | None]
    present: Sequence[Tensor]
    anchor: Tensor | None
    errors: tuple[Exception, ...]
    first_use: bool


@dataclass(frozen=True, slots=True)
class _Call:
    """What was passed and read: ``given`` are the gradients passed, ``local`` the local ones found."""

    platform: Platform
    parameters: Sequence[Tensor]
    names: Sequence[str]
    given: Sequence[Tensor | None] | None
    local: Sequence[Tensor | None]
    pp_mesh: Any
    groups: Groups | None


@dataclass(slots=True)
class _Entry:
    """What a parameter list leads to, as long as its parameters live and their signature stays.

    The references are weak, and the death of any parameter drops the entry, so that no model is kept alive and
    no reused id is mistaken for an old one. ``indices`` is None if all parameters take part.
    """

    signature: Sequence[Hashable]
    pp_mesh: Any
    pipeline: Mesh | None
    descriptions: tuple[Description, ...]
    references: tuple[weakref.ref[Any], ...]
    groups: Groups
    plan: ReductionPlan
    tensors: tuple[TensorMeta, ...]
    indices: tuple[int, ...] | None
    errors: tuple[Exception, ...]


_entries: dict[tuple[int, ...], _Entry] = {}


def prepare(
    source: Any,
    gradients: Iterable[Tensor | None] | None,
    pp_mesh: Any = None,
    names: Sequence[str] | None = None,
) -> Prepared:
    """Read the gradients of the parameters in ``source`` and find or build the plan.

    What is wrong with the gradients goes into ``errors`` of the result: other ranks may be waiting, and are to know.

    Args:
        source: a module or cell, a tensor, or an iterable of tensors.
        gradients: one per parameter, None allowed; without it they are read from the parameters.
        pp_mesh: the device mesh or process group of the pipeline stages.
        names: what to call the tensors of an iterable.

    Raises:
        TypeError: ``source`` holds something else than tensors.
    """
    platform = get_platform()
    parameters, own_names = platform.parameters(source)
    given = None if gradients is None else list(gradients)
    wrong: tuple[Exception, ...] = ()
    try:
        if given is not None and len(given) != len(parameters):
            raise ValueError(f"{len(given)} gradients for {len(parameters)} parameters")
        local, signature = platform.gradients(parameters, given)
    except (TypeError, ValueError) as error:
        wrong, given = (error,), [None] * len(parameters)
        local, signature = platform.gradients(parameters, given)
    key = (given is not None, pp_mesh is not None, hash(tuple(names or ())), *map(id, parameters))
    entry = _entries.get(key)
    # By the core's mesh, as frameworks may take a mesh and a slice of another one to be equal.
    if entry is not None and entry.pp_mesh is not pp_mesh and entry.pipeline != platform.mesh(pp_mesh):
        entry = None
    known = entry is not None and entry.signature == signature
    if entry is None or not known:
        groups = entry.groups if entry is not None else None
        call = _Call(platform, parameters, names or own_names, given, local, pp_mesh, groups)
        entry = _describe(call, signature, entry.descriptions if entry is not None else (), key)
        _warn_of_gradients(call)
    chosen = local if entry.indices is None else [local[index] for index in entry.indices]
    anchor = parameters[0] if parameters else None
    present = [gradient for gradient in chosen if gradient is not None]
    errors = (*wrong, *entry.errors) if wrong else entry.errors
    return Prepared(platform, entry.plan, entry.tensors, chosen, present, anchor, errors, not known)


def bounded(prepared: Prepared, max_norm: float) -> Prepared:
    """The same with an error if nothing can be clipped to ``max_norm``: it may be so on this rank alone."""
    if max_norm >= 0:
        return prepared
    error = ValueError(f"max_norm must be at least 0 (inf only measures), got {max_norm}")
    return replace(prepared, errors=(error, *prepared.errors))


def forget_layouts() -> None:
    """Plan anew in the next call, as what is attached to some parameter has changed."""
    _entries.clear()


def _describe(
    call: _Call, signature: Sequence[Hashable], previous: Sequence[Description], key: tuple[int, ...]
) -> _Entry:
    """Build an entry and keep it."""
    platform, rank = call.platform, call.platform.rank()
    descriptions = [_description(call, index, previous) for index in range(len(call.parameters))]
    first = {id(parameter): index for index, parameter in reversed(list(enumerate(call.parameters)))}
    indices = tuple(
        index
        for index in sorted(first.values())
        if call.given is not None or descriptions[index].requires_grad
    )
    metas: list[TensorMeta] = []
    errors: list[Exception] = []
    for index in indices:
        description = descriptions[index]
        name = call.names[index] if call.names else f"tensor {index}"
        shared = getattr(call.parameters[index], SHARED_ATTRIBUTE, None)
        metas.append(TensorMeta(name, description.global_shape, description.layout, shared))
        errors.extend(_misfit(name, description, rank))
    pipeline = None if call.pp_mesh is None else platform.mesh(call.pp_mesh)
    # Groups that were noted since the last plan may not be known on a rank whose plan has not changed.
    groups = call.groups if call.groups is not None else platform.groups()
    plan = build_plan(tuple(metas), rank, groups, pipeline)

    def forget(_: object) -> None:
        _entries.pop(key, None)

    references = tuple(weakref.ref(parameter, forget) for parameter in call.parameters)
    entry = _Entry(
        signature,
        call.pp_mesh,
        pipeline,
        tuple(descriptions),
        references,
        groups,
        plan,
        tuple(metas),
        None if len(indices) == len(call.parameters) else indices,
        tuple(errors),
    )
    while len(_entries) >= _MAX_ENTRIES:
        _entries.pop(next(iter(_entries)), None)  # a parameter that dies just now may have dropped it
    _entries[key] = entry
    return entry


def _description(call: _Call, index: int, previous: Sequence[Description]) -> Description:
    """A gradient may lie differently than its parameter; while it is missing it counts as lying as it did before."""
    found = call.platform.describe(call.parameters[index], None if call.given is None else call.given[index])
    if previous and call.local[index] is None:
        return replace(previous[index], requires_grad=found.requires_grad)
    return found


def _misfit(name: str, description: Description, rank: int) -> Iterable[ValueError]:
    """A local tensor that is not what its layout says."""
    layout = description.layout
    if layout is None or layout.mesh.coordinate(rank) is None:
        return
    expected = layout.local_shape(rank)
    if expected != description.local_shape:
        yield ValueError(
            f"{name}: the local tensor has shape {description.local_shape}, but its layout "
            f"(global shape {layout.global_shape}, {layout.placements}) puts {expected} on rank {rank}"
        )


def _warn_of_gradients(call: _Call) -> None:
    if (
        call.given is None
        and call.parameters
        and not any(map(call.platform.carries_gradient, call.parameters))
    ):
        warnings.warn(
            "none of the tensors carries a gradient or requires one: were gradients passed where "
            "parameters are expected? Nothing is clipped",
            stacklevel=4,
        )

"""From what the caller passes to a plan and local gradients; what does not change between steps is kept."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.plan import ReductionPlan, TensorMeta, build_plan
from hyper_parallel.interface import Description, Platform, Tensor
from hyper_parallel.platforms import get_platform

_MAX_ENTRIES = 64


@dataclass(frozen=True, slots=True)
class Prepared:
    """One call: the plan, this rank's local gradients in plan order, and what is wrong on this rank.

    ``anchor`` is the first parameter: its device is that of the buffer, even on ranks that have no gradient.
    """

    platform: Platform
    plan: ReductionPlan
    gradients: Sequence[Tensor | None]
    anchor: Tensor | None
    errors: tuple[Exception, ...]
    first_use: bool


@dataclass(slots=True)
class _Entry:
    """What a parameter list leads to, as long as its parameters live and their signature stays.

    The references are weak, and the death of any parameter drops the entry, so that no model is kept alive and
    no reused id is mistaken for an old one. ``indices`` is None if all parameters take part.
    """

    signature: Sequence[Hashable]
    explicit: bool
    references: tuple[weakref.ref[Any], ...]
    plan: ReductionPlan
    indices: tuple[int, ...] | None
    errors: tuple[Exception, ...]


_entries: dict[tuple[int, ...], _Entry] = {}


def prepare(source: Any, gradients: Iterable[Tensor | None] | None) -> Prepared:
    """Read the gradients of the parameters in ``source`` and find or build the plan.

    Args:
        source: a module or cell, a tensor, or an iterable of tensors.
        gradients: one per parameter, None allowed; without it they are read from the parameters.

    Raises:
        TypeError: ``source`` holds something else than tensors.
        ValueError: ``gradients`` are not as many as the parameters.
    """
    platform = get_platform()
    parameters, names = platform.parameters(source)
    given = None if gradients is None else list(gradients)
    if given is not None and len(given) != len(parameters):
        raise ValueError(f"{len(given)} gradients for {len(parameters)} parameters")
    local, signature = platform.gradients(parameters, given)
    key = tuple(map(id, parameters))
    entry = _entries.get(key)
    known = entry is not None and entry.explicit == (given is not None) and entry.signature == signature
    if entry is None or not known:
        entry = _describe(platform, parameters, names, given, signature, key)
        _warn_of_gradients(platform, parameters, given)
    chosen = local if entry.indices is None else [local[index] for index in entry.indices]
    anchor = parameters[0] if parameters else None
    return Prepared(platform, entry.plan, chosen, anchor, entry.errors, not known)


def _describe(
    platform: Platform,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    gradients: Sequence[Tensor | None] | None,
    signature: Sequence[Hashable],
    key: tuple[int, ...],
) -> _Entry:
    """Build an entry and keep it."""
    metas: list[TensorMeta] = []
    indices: list[int] = []
    errors: list[Exception] = []
    seen: set[int] = set()
    for index, parameter in enumerate(parameters):
        gradient = None if gradients is None else gradients[index]
        description = platform.describe(parameter, gradient)
        if id(parameter) in seen or (gradients is None and not description.requires_grad):
            continue
        seen.add(id(parameter))
        name = names[index] if names else f"tensor {index}"
        errors.extend(_misfit(name, description, platform.rank()))
        metas.append(TensorMeta(name, description.global_shape, description.layout))
        indices.append(index)
    plan = build_plan(tuple(metas), platform.rank(), platform.groups())
    whole = len(indices) == len(parameters)

    def forget(_: object) -> None:
        _entries.pop(key, None)

    references = tuple(weakref.ref(parameter, forget) for parameter in parameters)
    entry = _Entry(
        signature, gradients is not None, references, plan, None if whole else tuple(indices), tuple(errors)
    )
    while len(_entries) >= _MAX_ENTRIES:
        _entries.pop(next(iter(_entries)))
    _entries[key] = entry
    return entry


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


def _warn_of_gradients(
    platform: Platform, parameters: Sequence[Tensor], given: Sequence[Tensor | None] | None
) -> None:
    if given is None and parameters and not any(map(platform.carries_gradient, parameters)):
        warnings.warn(
            "none of the tensors carries a gradient or requires one: were gradients passed where "
            "parameters are expected? Nothing is clipped",
            stacklevel=4,
        )

"""Warnings about a plan.

``error``: clipping raises on every rank. ``replicated``: what is the same on every rank is most of the work.
``partial``: the values of Partial gradients are reduced. ``several_steps``: no process group spans the ranks.
``several_parts``: no set of ranks is the same for all of its members. ``host_waits``: on an accelerator the host waits.
``nothing_communicated``: this rank finishes by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from math import prod

from hyper_parallel.cli.explanation import Advice, ParameterGroup, PartExplanation
from hyper_parallel.cli.names import bytes_name
from hyper_parallel.core.plan import ReductionPlan

_MIN_REPLICATED = 2**20
_MIN_PARTIAL_BYTES = 2**20
_MAX_NAMED = 3


def find_advice(
    plan: ReductionPlan, parts: Sequence[PartExplanation], host_waits: bool
) -> tuple[Advice, ...]:
    """All warnings about a plan and what explains it."""
    return (
        *(Advice("error", text) for part in plan.parts for text in part.errors),
        *_alone(plan),
        *_replicated(parts),
        *(advice for part in parts for advice in _partial(part)),
        *_several(plan, parts),
        *(_waiting(plan, parts) if host_waits else ()),
    )


def _alone(plan: ReductionPlan) -> Iterable[Advice]:
    if not plan.communicates and any(part.tensors for part in plan.parts):
        yield Advice(
            "nothing_communicated",
            "No other rank takes part: every parameter is plain or lies on a mesh of one rank. That is right for one "
            "process, and for data parallelism that has averaged its gradients. A plain tensor that holds a "
            "shard needs attach_layout.",
        )


def _replicated(parts: Sequence[PartExplanation]) -> Iterable[Advice]:
    """What all ranks read alike is work that more ranks do not shorten."""
    total = sum(term.elements for part in parts for term in part.terms)
    found = [
        (group, part.holders)
        for part in parts
        if part.holders > 1
        for term in part.terms
        if not term.partial and term.copies >= part.holders
        for group in term.groups
    ]
    same = sum(group.elements for group, _ in found)
    if same < _MIN_REPLICATED or 2 * same <= total:
        return
    found.sort(key=lambda pair: -pair[0].elements)
    groups = [group for group, _ in found]
    yield Advice(
        "replicated",
        f"{_named(groups)} {'is' if len(groups) == 1 else 'are'} the same on all {found[0][1]:,} ranks, and each rank "
        f"reads all {same:,} elements: {same / total:.0%} of its work, which more ranks do not shorten. Sharding "
        f"{'it' if len(groups) == 1 else 'them'} would leave a rank with {-(-same // found[0][1]):,}.",
        tuple(group.name for group in groups),
    )


def _partial(part: PartExplanation) -> Iterable[Advice]:
    reduces = [each for each in part.before if each.purpose == "bucket"]
    num_bytes = sum(each.num_bytes * each.repeats for each in reduces)
    if num_bytes < _MIN_PARTIAL_BYTES:
        return
    groups = sorted(
        (group for term in part.terms if term.partial for group in term.groups), key=lambda g: -g.elements
    )
    number = sum(each.repeats for each in reduces)
    finish = sum(each.num_bytes for each in part.finish)
    yield Advice(
        "partial",
        f"{_named(groups)} {'is' if len(groups) == 1 else 'are'} Partial: the values have to be reduced before their "
        f"norm, which takes {number:,} reduce-scatter{'s' * (number != 1)} of {bytes_name(num_bytes)} in all, beside "
        f"{bytes_name(finish)} for the norm itself. If the optimizer needs these gradients reduced anyway, reduce "
        "first and clip then.",
        tuple(group.name for group in groups),
    )


def _several(plan: ReductionPlan, parts: Sequence[PartExplanation]) -> Iterable[Advice]:
    if len(parts) > 1:
        sizes = ", ".join(f"{max(part.num_ranks, 1):,}" for part in parts)
        yield Advice(
            "several_parts",
            f"The meshes do not lead to a set of ranks that is the same for all of its members, so the norm is "
            f"finished in {len(parts)} parts of {sizes} ranks. Meshes that are slices of one root mesh would need "
            "one.",
        )
    for part in plan.parts:
        if len(part.steps) > 1:
            yield Advice(
                "several_steps",
                f"No process group spans the {prod(map(len, part.steps)):,} ranks that clip together, so it takes "
                f"{len(part.steps)} all-reduces, one mesh dim after another. torch has a group of the whole job and "
                "one of each mesh dim. Where the other mesh dims are pipeline stages, pp_mesh makes it one.",
            )


def _waiting(plan: ReductionPlan, parts: Sequence[PartExplanation]) -> Iterable[Advice]:
    copied: list[str] = []
    for part in plan.parts:
        names = {index: meta.name for index, meta in zip(part.indices, part.tensors, strict=True)}
        copied.extend(names[index] for index, _ in part.copies if part.steps)
    reasons = []
    if copied:
        few = f": {', '.join(copied[:_MAX_NAMED])}" if len(copied) <= _MAX_NAMED else ""
        number = "one parameter is" if len(copied) == 1 else f"{len(copied):,} parameters are"
        reasons.append(f"{number} held by several ranks, any of which may lack the gradient{few}")
    if any(term.partial for part in parts for term in part.terms):
        reasons.append("the flags of Partial gradients are read")
    if plan.last is not None or any(part.steps != part.copy_steps for part in plan.parts):
        reasons.append("pipeline stages are combined")
    if len(plan.parts) > 1:
        reasons.append("several parts follow one another")
    yield Advice(
        "host_waits",
        f"On an accelerator the host waits for the device in every call, because {', and '.join(reasons)}.",
        tuple(islice(copied, _MAX_NAMED)) if len(copied) <= _MAX_NAMED else (),
    )


def _named(groups: Sequence[ParameterGroup]) -> str:
    names = [group.name for group in groups[:_MAX_NAMED]]
    more = len(groups) - len(names)
    return ", ".join(names) + (f" and {more} more kinds" if more > 0 else "")

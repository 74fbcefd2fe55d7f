"""What the packed buffer and the counts of copies say to be wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from hyper_parallel import wire
from hyper_parallel.core.plan import Part
from hyper_parallel.failures import Failure, difference, gather, merged
from hyper_parallel.interface import Platform


def found(part: Part, platform: Platform, header: Sequence[float], failure: Failure | None) -> Failure | None:
    """What any rank reported in the buffer, the same on every rank."""
    if header[wire.ERROR] > 0:
        return merged(gather(platform, part.steps, failure.reports if failure else ()), failure)
    apart = wire.stages_apart(header)
    if apart or wire.disagree(header, wire.PLAN):
        found = gather(platform, part.steps, (part.stage, [str(meta) for meta in part.tensors]))
        return difference(
            [(rank, lines) for rank, (stage, lines) in found if stage in apart[:1] or not apart]
        )
    return None


def check_alone(header: Sequence[float], failure: Failure | None) -> None:
    """Raise without a gather: where reading makes the host wait, the ranks need not read in the same call."""
    if failure is not None:
        raise failure.exception()
    if header[wire.ERROR] > 0:
        raise RuntimeError("another rank could not compute its part of the norm and raised the reason")
    if wire.disagree(header, wire.PLAN):
        raise RuntimeError("the ranks clip different tensors: the names, shapes or placements differ")


def torn(part: Part, rank: int, slots: Mapping[int, int], counts: Sequence[float]) -> Failure | None:
    """A Partial tensor that is missing on all ranks of one copy, and not of another, has been weighted wrongly."""
    names = dict(zip(part.indices, part.tensors, strict=True))
    everywhere = prod(len(ranks) for ranks in part.copy_steps)
    errors = [
        ValueError(f"{meta.name} is {meta.layout.placements} and has a gradient on some copies only")
        for reduction in part.reductions
        for index in reduction.term.indices
        if (meta := names[index]).layout is not None and index in slots
        if 0 < counts[slots[index]] < everywhere // meta.layout.num_chunks
    ]
    return Failure.of(rank, errors)


def uneven_copies(part: Part, platform: Platform, there: Sequence[tuple[int, int, bool]]) -> Failure | None:
    """Pieces of which some copies have a gradient and others have none; all ranks find the same.

    Args:
        part: whose tensors they are.
        platform: gathers what all ranks of the part have, one gather per step.
        there: (tensor index, slot, whether this rank has a gradient) of what this rank holds a copy of.
    """
    names = {index: meta.name for index, meta in zip(part.indices, part.tensors, strict=True)}
    told = gather(platform, part.steps, [(names[index], slot, present) for index, slot, present in there])
    held: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
    for rank, pieces in told:
        for name, slot, present in pieces:
            held.setdefault((name, slot), ([], []))[present].append(rank)
    reports = tuple(
        (
            None,
            "ValueError",
            f"{name} has a gradient on ranks {having} but none on ranks {lacking}, which hold copies",
        )
        for (name, _), (lacking, having) in sorted(held.items())
        if lacking and having
    )
    return Failure(reports) if reports else None

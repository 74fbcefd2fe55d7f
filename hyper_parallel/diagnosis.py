"""Finds the tensors at fault: those that are not finite, and those whose copies differ."""

from __future__ import annotations

import math
from typing import NoReturn

from hyper_parallel.core.plan import ReductionPlan
from hyper_parallel.execution import Request
from hyper_parallel.failures import gather

_MAX_NAMED = 10


def raise_nonfinite(plan: ReductionPlan, request: Request) -> NoReturn:
    """Raise on every rank, naming the tensors that hold NaN or infinity and the ranks they were found on.

    Collectives: one gather per step of the plan's part. Of several parts, others may be finite, and their ranks do
    not come here: then each rank names its own.
    """
    alone = len(plan.parts) > 1
    found: dict[str, set[int]] = {}
    for part in plan.parts:
        local = [
            meta.name
            for index, meta in zip(part.indices, part.tensors, strict=True)
            if (gradient := request.gradients[index]) is not None
            and request.platform.nonfinite_count(gradient)
        ]
        for rank, names in gather(request.platform, () if alone else part.steps, local):
            for name in names:
                found.setdefault(name, set()).add(rank)
    for _, theirs in gather(request.platform, plan.last.steps, found) if plan.last is not None else ():
        for name, ranks in theirs.items():
            found.setdefault(name, set()).update(ranks)
    named = [f"{name} (ranks {sorted(ranks)})" for name, ranks in list(found.items())[:_MAX_NAMED]]
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    nothing = "none on this rank" if alone else "none, the norm itself overflows"
    raise RuntimeError(
        f"the total norm of order {request.kind.p} is non-finite, so the gradients were not clipped. "
        f"Non-finite gradients: {', '.join(named) or nothing}{more}. "
        "Pass error_if_nonfinite=False to scale by the non-finite norm instead"
    )


def replica_errors(plan: ReductionPlan, request: Request) -> tuple[Exception, ...]:
    """An error that names the tensors whose copies differ between ranks, the same on all ranks of a part.

    Collectives: per part of the plan one all-reduce of two numbers per copied piece, over each step.
    """
    differing: list[str] = []
    for part in plan.parts:
        names = dict(zip(part.indices, part.tensors, strict=True))
        table = [-math.inf] * (2 * part.num_slots)
        for index, slot in part.copies:
            layout, gradient = names[index].layout, request.gradients[index]
            if gradient is not None and not (layout is not None and layout.partial_dims):
                checksum = (request.platform.read(request.platform.checksum(gradient), True) or [math.nan])[0]
                checksum = math.inf if math.isnan(checksum) else checksum  # a maximum would drop it
                table[slot], table[part.num_slots + slot] = checksum, -checksum
        if not part.num_slots:
            continue
        buffer = request.platform.pack(table, request.anchor)
        for ranks in part.copy_steps:
            buffer = request.platform.all_reduce(buffer, "max", ranks)
        reduced = request.platform.read(buffer, True) or ()
        start = 0
        for index, _ in part.copies:  # all pieces of a tensor, so that ranks with other pieces find the same
            slots = range(start, start + names[index].num_chunks)
            if any(reduced[slot] > -reduced[part.num_slots + slot] for slot in slots):
                differing.append(names[index].name)
            start = slots.stop
    text = f"the copies of these gradients differ between ranks: {', '.join(differing[:_MAX_NAMED])}"
    return (RuntimeError(text),) if differing else ()

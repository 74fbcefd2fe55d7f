"""Runs a ReductionPlan through a Platform: local statistics, one packed all-reduce, the checks, the root.

The buffer has the same length whatever the plan, ``[statistic, nan, error, digests...]``, so that ranks whose plans
disagree still meet in it, and every rank learns of a failure on any other and raises with it.

A digest travels as bits beside their complements: if ranks differ in a bit, both it and its complement come back
above zero, under SUM as well as under MAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from hyper_parallel.core.norm import NormKind
from hyper_parallel.core.plan import DIGEST_BITS, Part, ReductionPlan, digest_bits
from hyper_parallel.interface import Buffer, Platform, Scalar, Tensor

_NAN, _ERROR, _PLAN = 1, 2, 3
_PRESENCE = _PLAN + 2 * DIGEST_BITS
_ERROR_TYPES = {kind.__name__: kind for kind in (ValueError, TypeError, NotImplementedError, MemoryError)}
_MAX_NAMED = 10


@dataclass(frozen=True, slots=True)
class Request:
    """One norm to compute: local gradients in plan order (None: missing) and errors this rank found before.

    The buffer lives on the device of ``anchor``.
    """

    platform: Platform
    kind: NormKind
    gradients: Sequence[Tensor | None]
    anchor: Tensor | None
    foreach: bool | None = None
    errors: tuple[Exception, ...] = ()


def total_norm(plan: ReductionPlan, request: Request, first_use: bool) -> Scalar:
    """The norm over all ranks, as a 0-d scalar of the platform's widest float.

    Collectives: per part of the plan one all-reduce per step. If of several copies only some have a gradient, two
    more find out which; an error costs one gather of messages.

    Args:
        plan: what to contribute and where to reduce it.
        request: the gradients and the norm kind.
        first_use: read the checks of the buffer even if the host has to wait for the device.

    Raises:
        ValueError, TypeError, RuntimeError: on every rank, if any rank found an error or the plans disagree.
    """
    statistics = [_reduce(part, request, first_use) for part in plan.parts]
    total = statistics[0]
    for statistic in statistics[1:]:
        total = total + statistic if request.kind.reduce_op == "sum" else _larger(request, total, statistic)
    return request.kind.root(total * request.kind.sign)


def raise_nonfinite(plan: ReductionPlan, request: Request) -> NoReturn:
    """Raise on every rank, naming the tensors that hold NaN or infinity and the ranks they were found on.

    Collectives: per part of the plan one gather per step.
    """
    found: dict[str, set[int]] = {}
    for part in plan.parts:
        local = [
            meta.name
            for index, meta in zip(part.indices, part.tensors, strict=True)
            if (gradient := request.gradients[index]) is not None
            and request.platform.nonfinite_count(gradient)
        ]
        for rank, names in _gather(part, request, local):
            for name in names:
                found.setdefault(name, set()).add(rank)
    named = [f"{name} (ranks {sorted(ranks)})" for name, ranks in list(found.items())[:_MAX_NAMED]]
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    raise RuntimeError(
        f"the total norm of order {request.kind.p} is non-finite, so the gradients were not clipped. "
        f"Non-finite gradients: {', '.join(named) or 'none, the norm itself overflows'}{more}. "
        "Pass error_if_nonfinite=False to scale by the non-finite norm instead"
    )


def _reduce(part: Part, request: Request, first_use: bool) -> Scalar:
    """The statistic of a part over all its ranks, with the sign it travels with."""
    statistic, error = _local(part, request)
    if not part.steps:
        if error is not None:
            raise error
        return request.platform.pack([statistic], request.anchor)[0]
    buffer = _all_reduce(part, request, _packed(part, request, statistic, error))
    read = request.platform.read
    if (header := read(buffer, False)) is not None:
        _check(part, request, header, error)
        if request.kind.reduce_op == "sum" and _disagree(header, _PRESENCE):
            return _settle(part, request)
    elif first_use or error is not None:
        _check_alone(read(buffer, True) or (), error)
    if request.kind.reduce_op == "sum":
        return buffer[0] / part.divisor
    return request.platform.where(buffer[_NAN] > 0, math.nan, buffer[0])


def _settle(part: Part, request: Request) -> Scalar:
    """The statistic when of several copies of a chunk only some have a gradient: count those, then divide by them."""
    slots = dict(part.copies)
    table = [0.0] * part.num_slots
    for index, slot in slots.items():
        table[slot] = float(request.gradients[index] is not None)
    counts = request.platform.read(
        _all_reduce(part, request, request.platform.pack(table, request.anchor)), True
    )
    assert counts is not None
    terms: dict[float, list[int]] = {}
    for index in part.indices:
        count = counts[slots[index]] if index in slots else 1.0
        terms.setdefault(1 / max(count, 1.0), []).append(index)
    statistic = _statistic(list(terms.items()), request)
    return _all_reduce(part, request, request.platform.pack([statistic], request.anchor))[0]


def _local(part: Part, request: Request) -> tuple[Scalar | float, Exception | None]:
    """This rank's statistic; NaN beside the error if there is one, as the other ranks are waiting."""
    errors = (*request.errors, *map(ValueError, part.errors))
    if errors:
        return math.nan, errors[0]
    try:
        return _statistic(part.terms, request), None
    except Exception as error:  # noqa: BLE001
        return math.nan, error


def _statistic(terms: Sequence[tuple[float, Sequence[int]]], request: Request) -> Scalar | float:
    """This rank's weighted statistic, with the sign it travels with."""
    kind, platform = request.kind, request.platform
    if kind.reduce_op == "max":
        terms = [(1, [index for _, indices in terms for index in indices])]
    total: Scalar | float = kind.identity * kind.sign
    for weight, indices in terms:
        present = [gradient for index in indices if (gradient := request.gradients[index]) is not None]
        if present:
            statistic = platform.statistic(present, kind, request.foreach) * (weight * kind.sign)
            total = statistic + total if kind.reduce_op == "sum" else statistic
    return total


def _packed(part: Part, request: Request, statistic: Scalar | float, error: Exception | None) -> Buffer:
    missing = ",".join(str(index) for index, _ in part.copies if request.gradients[index] is None)
    nan = statistic != statistic if request.kind.reduce_op == "max" else 0.0
    header = (float(error is not None), *_bits(part.digest), *_bits(digest_bits(missing)))
    return request.platform.pack([statistic, nan, *header], request.anchor)


@lru_cache(maxsize=256)
def _bits(digest: int) -> tuple[float, ...]:
    bits = [float(digest >> position & 1) for position in range(DIGEST_BITS)]
    return (*bits, *(1 - bit for bit in bits))


def _disagree(header: Sequence[float], start: int) -> bool:
    bits = header[start : start + DIGEST_BITS]
    return any(a > 0 and b > 0 for a, b in zip(bits, header[start + DIGEST_BITS :], strict=False))


def _larger(request: Request, a: Scalar, b: Scalar) -> Scalar:
    where = request.platform.where
    return where(a > b, a, where(b >= a, b, a + b))  # neither holds if one is NaN, and then so is the sum


def _all_reduce(part: Part, request: Request, buffer: Buffer) -> Buffer:
    for ranks in part.steps:
        buffer = request.platform.all_reduce(buffer, request.kind.reduce_op, ranks)
    return buffer


def _gather(part: Part, request: Request, value: Any) -> list[tuple[int, Any]]:
    """(rank, value) of all ranks of the part."""
    gathered = [(request.platform.rank(), value)]
    for ranks in part.steps:
        gathered = [pair for pairs in request.platform.all_gather_object(gathered, ranks) for pair in pairs]
    return sorted(gathered, key=lambda pair: pair[0])


def _check(part: Part, request: Request, header: Sequence[float], error: Exception | None) -> None:
    """Raise what any rank reported, the same on every rank."""
    if header[_ERROR] > 0:
        found = _gather(part, request, None if error is None else (type(error).__name__, str(error)))
        messages = [(rank, *value) for rank, value in found if value is not None]
        kind = _ERROR_TYPES.get(messages[0][1], RuntimeError)
        raise kind("; ".join(f"rank {rank}: {message}" for rank, _, message in messages)) from error
    if _disagree(header, _PLAN):
        raise RuntimeError(_difference(_gather(part, request, [str(meta) for meta in part.tensors])))


def _check_alone(header: Sequence[float], error: Exception | None) -> None:
    """Raise without a gather: where reading makes the host wait, the ranks need not read in the same call."""
    if error is not None:
        raise error
    if header[_ERROR] > 0:
        raise RuntimeError("another rank could not compute its part of the norm and raised the reason")
    if _disagree(header, _PLAN):
        raise RuntimeError("the ranks clip different tensors: the names, shapes or placements differ")


def _difference(listed: Sequence[tuple[int, Sequence[str]]]) -> str:
    """Where the tensor lists of two ranks part."""
    first, reference = listed[0]
    for rank, lines in listed[1:]:
        for here, there in zip(
            [*reference, "no further tensor"], [*lines, "no further tensor"], strict=False
        ):
            if here != there:
                return f"the ranks clip different tensors: rank {first} has {here}; rank {rank} has {there}"
    return "the ranks clip the same tensors, but with different groups of ranks"

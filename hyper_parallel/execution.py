"""Runs a ReductionPlan through a Platform: local statistics, one packed all-reduce, the checks, the root.

The buffer has the same length whatever the plan (see ``wire``), so that ranks whose plans disagree still meet in it,
and every rank learns of a failure on any other and raises with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from hyper_parallel import checks, sharing, wire
from hyper_parallel.core.norm import NormKind
from hyper_parallel.core.plan import Part, ReductionPlan, Term, digest_bits
from hyper_parallel.core.union import Ranks
from hyper_parallel.failures import Failure
from hyper_parallel.interface import Buffer, Platform, Scalar, Tensor
from hyper_parallel.partials import combine, reduce_partials


@dataclass(frozen=True, slots=True)
class Request:
    """One norm to compute: local gradients by tensor index (None: missing) and errors this rank found before.

    The buffer lives on the device of ``anchor``. ``stages`` says how many pipeline stages share a key, and
    ``table`` is a digest of all that stages share, as this rank knows it; ``asked``: it has just asked. ``several``
    exchanges finish the norm, and a failure in one is told in the next.
    """

    platform: Platform
    kind: NormKind
    gradients: Sequence[Tensor | None]
    anchor: Tensor | None
    foreach: bool | None = None
    errors: tuple[Exception, ...] = ()
    first_use: bool = False
    stages: Mapping[str, int] = field(default_factory=dict)
    table: int = 0
    asked: bool = False
    several: bool = False


@dataclass(frozen=True, slots=True)
class _State:
    """What the parts have given so far, on this rank.

    Statistics have the sign and the weight they travel with; ``partial`` is the share of the Partial tensors, and
    ``present`` are those of them that have a gradient somewhere. ``stale``: some rank must ask who shares its keys.
    ``finished``: the part has failed, and its ranks know.
    """

    statistic: Scalar | float
    failure: Failure | None
    stale: bool
    partial: Scalar | None = None
    present: frozenset[int] = frozenset()
    finished: bool = False


def total_norm(plan: ReductionPlan, request: Request) -> Scalar:
    """The norm over all ranks, as a 0-d scalar of the platform's widest float; see ``total_statistic``."""
    return request.kind.root(total_statistic(plan, request))


def total_statistic(plan: ReductionPlan, request: Request) -> Scalar:
    """The statistic over all ranks, of which the norm is the root.

    Collectives: per part of the plan one all-reduce per step. If of several copies only some have a gradient, two
    more find out which; Partial gradients cost one more and those of ``reduce_partials``; an error, or a change in
    what pipeline stages share, costs one gather of messages.

    Raises:
        ValueError, TypeError, RuntimeError: on every rank, if any rank found an error or the plans disagree.
    """
    known = sharing.known_stages(plan)
    stages, table = known or ({}, 0)
    several = len(plan.parts) > 1 or plan.last is not None
    request = replace(request, stages=stages, table=table, several=several)
    state = _run(plan, request, bool(plan.shared) and known is None)
    if state.failure is not None:
        raise state.failure.exception(alone=not plan.communicates)
    if state.stale:
        sharing.learn_stages(plan, request.platform)
        return total_statistic(plan, replace(request, asked=True))
    return state.statistic * request.kind.sign


def _run(plan: ReductionPlan, request: Request, stale: bool) -> _State:
    """All parts and the last one; a failure in one is told in all that follow, as their ranks are waiting."""
    failure = Failure.of(request.platform.rank(), request.errors)
    states: list[_State] = []
    for part in plan.parts:
        states.append(_contribution(part, request, _State(math.nan, failure, stale)))
        failure = failure or states[-1].failure
    total: _State | None = None
    for part, state in zip(plan.parts, states, strict=True):
        finished = _finish(part, request, replace(state, failure=failure))
        failure = finished.failure
        if total is not None:
            both = combine(request.platform, request.kind, total.statistic, finished.statistic)
            finished = replace(finished, statistic=both, stale=total.stale or finished.stale)
        total = finished
    assert total is not None
    return total if plan.last is None else _finish(plan.last, request, replace(total, finished=False))


def _contribution(part: Part, request: Request, state: _State) -> _State:
    """This rank's statistic of a part; on a failure it stays NaN, and the rank goes on, as the others wait."""
    failure = state.failure or Failure.of(request.platform.rank(), tuple(map(ValueError, part.errors)))
    partial = [request.gradients[index] for reduction in part.reductions for index in reduction.term.indices]
    try:
        request.platform.check_in_place([gradient for gradient in partial if gradient is not None])
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks are waiting
        failure = failure or Failure.of(request.platform.rank(), (error,))
    state = replace(state, failure=failure)
    if part.reductions and part.steps:
        state = _announce(part, request, state)
    if state.failure is not None:
        return state
    try:
        return _local(part, request, state)
    except Exception as error:  # noqa: BLE001
        return replace(state, failure=Failure.of(request.platform.rank(), (error,)))


def _announce(part: Part, request: Request, state: _State) -> _State:
    """Make sure that all ranks are about to reduce the same Partial gradients, before they do.

    Ranks that have none take this exchange for the one that finishes the part. They see the announcement: on a
    failure the part ends here for all, and else they exchange once more.
    """
    _, state, _ = _exchange(part, request, state, announce=True)
    return replace(state, finished=state.failure is not None)


def _local(part: Part, request: Request, state: _State) -> _State:
    """This rank's statistic of its tensors; Partial ones are reduced first."""
    partials: list[Scalar] = []
    present: set[int] = set()
    for reduction in part.reductions:
        gradients = [request.gradients[index] for index in reduction.term.indices]
        reduced = reduce_partials(request.platform, request.kind, reduction, gradients, request.anchor)
        present.update(i for i, there in zip(reduction.term.indices, reduced.present, strict=True) if there)
        if reduction.term.weight:
            weight = reduction.term.weight / _stages_of(request, reduction.term)
            partials.extend(_weighted(request, weight, reduced.statistics))
    terms = [(term.weight / _stages_of(request, term), term.indices) for term in part.terms]
    partial = _combined(request, partials) if partials else None
    total = _combined(request, [*partials, *_statistics(request, terms)])
    return replace(state, statistic=total, partial=partial, present=frozenset(present))


def _statistics(request: Request, terms: Iterable[tuple[float, Sequence[int]]]) -> list[Scalar]:
    """The weighted statistic of each term that has a gradient."""
    statistics = []
    for weight, indices in terms:
        there = [gradient for index in indices if (gradient := request.gradients[index]) is not None]
        if there:
            found = request.platform.statistic(there, request.kind, request.foreach)
            statistics.extend(_weighted(request, weight, (found,)))
    return statistics


def _stages_of(request: Request, term: Term) -> int:
    return 1 if term.shared is None else request.stages.get(term.shared, 1)


def _weighted(request: Request, weight: float, statistics: Sequence[Scalar]) -> list[Scalar]:
    """Statistics as they travel: times their weight if they are summed, else with the sign of their kind."""
    factor = weight if request.kind.reduce_op == "sum" else request.kind.sign
    return list(statistics) if factor == 1 else [statistic * factor for statistic in statistics]


def _combined(request: Request, statistics: Sequence[Scalar]) -> Scalar | float:
    if not statistics:
        return request.kind.identity * request.kind.sign
    return reduce(lambda a, b: combine(request.platform, request.kind, a, b), statistics)


def _finish(part: Part, request: Request, state: _State) -> _State:
    """The statistic of a part over all its ranks."""
    if not part.steps or state.finished:
        return replace(state, statistic=request.platform.pack([state.statistic], request.anchor)[0])
    buffer, state, header = _exchange(part, request, state)
    if header is not None and header[wire.ANNOUNCE] > 0 and state.failure is None:
        buffer, state, header = _exchange(part, request, state)
    if request.kind.reduce_op == "max":
        return replace(state, statistic=request.platform.where(buffer[wire.NAN] > 0, math.nan, buffer[0]))
    if header is not None and state.failure is None and wire.disagree(header, wire.PRESENCE):
        if part.strict:
            there = [(index, slot, _is_present(request, state, index)) for index, slot in part.copies]
            failure = checks.uneven_copies(part, request.platform, there)
            return replace(state, failure=failure, statistic=buffer[0] / part.divisor)
        buffer, state, _ = _exchange(part, request, _settled(part, request, state))
        return replace(state, statistic=buffer[0])
    return replace(state, statistic=buffer[0] / part.divisor)


def _exchange(
    part: Part, request: Request, state: _State, announce: bool = False
) -> tuple[Buffer, _State, Sequence[float] | None]:
    """Reduce the packed buffer, and check it where the host reads it.

    Where reading makes the host wait for the device, it does so only if a gradient may be missing on some copies, if
    several exchanges follow one another, and for pipeline stages: all ranks must take the same turn.
    """
    staged = part.steps != part.copy_steps
    digest = part.digest ^ request.table if staged else part.digest
    buffer = _all_reduce(request, part.steps, _packed(part, digest, request, state, announce))
    missing = part.copies and request.kind.reduce_op == "sum"
    header = request.platform.read(buffer, bool(missing or request.several or staged or announce))
    if header is not None:
        differ = staged and not request.asked and wire.disagree(header, wire.PLAN)
        state = replace(state, stale=header[wire.STALE] > 0 or differ)
        if header[wire.ERROR] > 0 or not differ or wire.stages_apart(header):
            state = replace(state, failure=checks.found(part, request.platform, header, state.failure))
    elif request.first_use or state.failure is not None:
        checks.check_alone(request.platform.read(buffer, True) or (), state.failure)
    return buffer, state, header


def _settled(part: Part, request: Request, state: _State) -> _State:
    """The share of this rank when of several copies only some have a gradient: divided by those that have."""
    slots = dict(part.copies)
    counts: Sequence[float] = ()
    if slots:
        table = [0.0] * part.num_slots
        for index, slot in slots.items():
            table[slot] = float(_is_present(request, state, index))
        packed = request.platform.pack(table, request.anchor)
        counts = request.platform.read(_all_reduce(request, part.copy_steps, packed), True) or ()
    terms: list[tuple[float, Sequence[int]]] = []
    for term in part.terms:
        for index in term.indices:
            copies = max(counts[slots[index]], 1.0) if index in slots else 1.0
            terms.append((1 / (copies * _stages_of(request, term)), (index,)))
    partials = [] if state.partial is None else [state.partial / part.divisor]
    return replace(
        state,
        statistic=_combined(request, [*partials, *_statistics(request, terms)]),
        failure=checks.torn(part, request.platform.rank(), slots, counts),
    )


def _is_present(request: Request, state: _State, index: int) -> bool:
    return request.gradients[index] is not None or index in state.present


def _packed(part: Part, digest: int, request: Request, state: _State, announce: bool) -> Buffer:
    # By position among the copies: the same tensor may have another index on another rank.
    missing = ",".join(
        str(position)
        for position, (index, _) in enumerate(part.copies)
        if not _is_present(request, state, index)
    )
    nan = state.statistic != state.statistic if request.kind.reduce_op == "max" else 0.0
    flags = wire.flags(state.failure is not None, state.stale, announce)
    digests = wire.digests(digest, digest_bits(missing), part.own_digest, part.stage, part.num_stages)
    return request.platform.pack([state.statistic, nan, *flags, *digests], request.anchor)


def _all_reduce(request: Request, steps: Sequence[Ranks], buffer: Buffer) -> Buffer:
    for ranks in steps:
        buffer = request.platform.all_reduce(buffer, request.kind.reduce_op, ranks)
    return buffer

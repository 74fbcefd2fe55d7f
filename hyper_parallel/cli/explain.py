"""Explains a plan in numbers: what is read, who holds copies, which collectives run with how many bytes.

Everything follows from the plan that ``clip_grad_norm_`` itself would run, so nothing here is communicated. The
numbers are those of a 2-norm with every gradient present, in any step but the first:

    from hyper_parallel.cli.explain import explain_model
    explain_model(model)                     # in a running job: rank 0 prints
    explain_model(model, show=False).as_json()

Bytes are those of the buffers that are passed to collectives. MindSpore on the CPU encodes statistics as integers,
which are more, and all-reduces where others reduce-scatter. A pipeline stage without Partial gradients takes one
more exchange than its own tensors show if another stage has some.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from hyper_parallel import wire
from hyper_parallel.cli.advice import find_advice
from hyper_parallel.cli.explanation import Collective, Explanation, PartExplanation, TermExplanation
from hyper_parallel.cli.names import group_parameters
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.plan import Part, Reduction, ReductionPlan, TensorMeta, Term, build_plan
from hyper_parallel.core.union import Groups
from hyper_parallel.partials import BUCKET_NUMEL
from hyper_parallel.preparation import forget_layouts, prepare

_VALUE_BYTES = 4  # Partial gradients are flattened to float32
_SCALAR_BYTES = 8


def explain(
    tensors: Sequence[TensorMeta],
    rank: int,
    groups: Groups,
    pipeline: Mesh | None = None,
    *,
    itemsizes: Sequence[int] | None = None,
    scalar_bytes: int = _SCALAR_BYTES,
    world_size: int | None = None,
) -> Explanation:
    """Explain the plan of ``build_plan``, whose first four arguments these are.

    Args:
        tensors, rank, groups, pipeline: as for ``build_plan``.
        itemsizes: the bytes of an element of each tensor's gradient, if known.
        scalar_bytes: the bytes of a statistic: 8 where the device has float64, else 4.
        world_size: how many ranks there are, if known.
    """
    return explain_plan(
        build_plan(tuple(tensors), rank, groups, pipeline), rank, itemsizes, scalar_bytes, world_size
    )


def explain_model(model: Any, grads: Any = None, pp_mesh: Any = None, *, show: bool = True) -> Explanation:
    """Explain, in a running job, what ``clip_grad_norm_`` would do with the same arguments; rank 0 prints it.

    Nothing is communicated, and any rank may call it alone. The next clipping plans and checks anew.

    Raises:
        TypeError, ValueError: as ``clip_grad_norm_`` would on this rank alone.
    """
    prepared = prepare(model, grads, pp_mesh)
    forget_layouts()  # the next call is the first one again
    platform, plan = prepared.platform, prepared.plan
    if prepared.errors:
        raise prepared.errors[0]
    sizes = [getattr(gradient, "itemsize", None) for gradient in prepared.gradients]
    known = [size for size in sizes if isinstance(size, int)]
    scalar = getattr(platform.pack([0.0], prepared.anchor), "itemsize", _SCALAR_BYTES)
    explanation = explain_plan(
        plan,
        platform.rank(),
        known if len(known) == len(sizes) else None,
        scalar,
        max(map(len, platform.groups()), default=1),
    )
    if show and platform.rank() == 0:
        from rich.console import Console

        from hyper_parallel.cli.report import print_explanation

        print_explanation(explanation, Console(), type(model).__name__)
    return explanation


def explain_plan(
    plan: ReductionPlan,
    rank: int,
    itemsizes: Sequence[int] | None = None,
    scalar_bytes: int = _SCALAR_BYTES,
    world_size: int | None = None,
) -> Explanation:
    """Explain a plan that is already there; the arguments are those of ``explain``."""
    parts = tuple(_explained(part, rank, scalar_bytes) for part in plan.parts)
    terms = [term for part in parts for term in part.terms]
    reduced = sum(term.elements_reduced for term in terms)
    several = plan.communicates and (len(plan.parts) > 1 or plan.last is not None)
    waits = several or any(map(_waits, plan.parts))
    return Explanation(
        rank=rank,
        world_size=world_size,
        parts=parts,
        last=() if plan.last is None else _packed(plan.last, "stages", scalar_bytes),
        elements_read=sum(term.elements for term in terms) + reduced,
        bytes_read=None
        if itemsizes is None
        else sum(
            _local_numel(meta, rank) * itemsizes[index]
            for part in plan.parts
            for index, meta in zip(part.indices, part.tensors, strict=True)
        )
        + reduced * _VALUE_BYTES,
        host_waits=waits,
        warnings=find_advice(plan, parts, waits),
    )


def _waits(part: Part) -> bool:
    """As in ``execution``: the host reads the buffer if copies may lack a gradient, for stages and for Partial ones."""
    return bool(part.steps) and bool(part.copies or part.reductions or part.steps != part.copy_steps)


def _explained(part: Part, rank: int, scalar_bytes: int) -> PartExplanation:
    metas = dict(zip(part.indices, part.tensors, strict=True))
    before: list[Collective] = []
    if part.reductions:
        before.extend(_packed(part, "agree", scalar_bytes))
    for reduction in part.reductions:
        before.extend(_reduced(reduction, scalar_bytes))
    purpose = "statistic" if part.steps == part.copy_steps else "stages"
    return PartExplanation(
        num_ranks=prod(len(ranks) for ranks in part.steps),
        holders=prod(len(ranks) for ranks in part.copy_steps),
        terms=(
            *(_term(part, term, metas, rank) for term in part.terms),
            *(_term(part, reduction.term, metas, rank, reduction) for reduction in part.reductions),
        ),
        before=tuple(before),
        finish=_packed(part, purpose, scalar_bytes),
    )


def _term(
    part: Part, term: Term, metas: dict[int, TensorMeta], rank: int, reduction: Reduction | None = None
) -> TermExplanation:
    held = [(metas[index], _local_numel(metas[index], rank)) for index in term.indices]
    lengths = () if reduction is None else bucket_lengths(reduction)
    ways = 1 if reduction is None else prod(len(ranks) for ranks, _ in reduction.chain)
    return TermExplanation(
        partial=reduction is not None,
        groups=group_parameters(held),
        elements=sum(numel for _, numel in held),
        copies=max(1, part.divisor // term.weight),
        shared=term.shared,
        buckets=len(lengths),
        elements_reduced=sum(length // ways for length in lengths),
    )


def bucket_lengths(reduction: Reduction) -> tuple[int, ...]:
    """The elements of each bucket of Partial gradients, padded to equal slices."""
    total, ways = sum(reduction.numels), prod(len(ranks) for ranks, _ in reduction.chain)
    lengths = [min(BUCKET_NUMEL, total - start) for start in range(0, total, BUCKET_NUMEL)]
    return tuple(-(-length // ways) * ways for length in lengths)


def _reduced(reduction: Reduction, scalar_bytes: int) -> Iterable[Collective]:
    """One flag for each tensor and one for NaN, then the buckets, over each mesh dim in turn."""
    flags = len(reduction.numels) + 1
    for ranks, _ in reduction.chain:
        yield Collective("all_reduce", "max", "flags", tuple(sorted(ranks)), flags, flags * scalar_bytes)
    lengths = bucket_lengths(reduction)
    for length in dict.fromkeys(lengths):
        elements = length
        for ranks, reduce_op in reduction.chain:
            yield Collective(
                "reduce_scatter",
                "sum" if reduce_op == "avg" else reduce_op,
                "bucket",
                tuple(sorted(ranks)),
                elements,
                elements * _VALUE_BYTES,
                lengths.count(length),
            )
            elements //= len(ranks)


def _packed(part: Part, purpose: str, scalar_bytes: int) -> tuple[Collective, ...]:
    numel = packed_numel(part)
    return tuple(
        Collective("all_reduce", "sum", purpose, ranks, numel, numel * scalar_bytes) for ranks in part.steps
    )


def packed_numel(part: Part) -> int:
    """The length of the packed buffer: the statistic, the NaN flag, and what ``wire`` adds."""
    digests = wire.digests(0, 0, 0, part.stage, part.num_stages)
    return 2 + len(wire.flags(False, False, False)) + len(digests)


def _local_numel(meta: TensorMeta, rank: int) -> int:
    return prod(meta.global_shape if meta.layout is None else meta.layout.local_shape(rank))

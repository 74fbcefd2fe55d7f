"""The total norm as cells for a compiled graph, made from a ``ReductionPlan``; see ``graph``.

A graph knows ``ops.AllReduce`` alone (``mint.distributed`` is for PyNative mode), and on the CPU that adds float32 and
float16 and does nothing else. So each rank adds its number to a row of zeros at its own place: what comes back are the
numbers of all ranks, in the same order and thus with the same sum on each of them, and their largest or smallest as
well, with NaN among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, nn, ops

from hyper_parallel.core.norm import NormKind
from hyper_parallel.core.plan import Part, Reduction, ReductionPlan, Term
from hyper_parallel.core.union import Ranks
from hyper_parallel_mindspore.process_groups import group_name, rank

_BLOCK = 4096


class TotalNorm(nn.Cell):
    """The norm of a tuple of gradients over all ranks, a 0-d float32 tensor.

    Args:
        plan: what this rank contributes, and to whom.
        kind: which norm.
        places: where the tensors of the plan stand among the gradients.
        sizes: how many elements each gradient has.
        stages: how many pipeline stages share the tensors of a key.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        kind: NormKind,
        places: Sequence[int],
        sizes: Sequence[int],
        stages: Mapping[str, int],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.parts = nn.CellList([_Part(part, kind, places, sizes, stages) for part in plan.parts])
        self.several = len(plan.parts) > 1
        self.combine = _Combination(kind)
        self.last = None if plan.last is None else _Finish(plan.last, kind)
        self.is_count = kind.p == 0
        self.exponent = 1.0 if kind.p == 0 or math.isinf(kind.p) else 1 / kind.p

    def construct(self, grads: Sequence[Tensor]) -> Tensor:
        found: tuple[Tensor, ...] = ()
        total = mint.zeros(1)
        for part in self.parts:
            total = part(grads, total)
            found += (total,)
        if self.several:
            total = self.combine(mint.cat(found))
        if self.last is not None:
            total = self.last(total, total)
        if self.is_count:
            total = mint.floor(total + 0.5)
        return total.reshape(()) ** self.exponent if self.exponent != 1.0 else total.reshape(())


class _Part(nn.Cell):
    """One part of the plan; the result is of one element, as all statistics here are."""

    def __init__(
        self,
        part: Part,
        kind: NormKind,
        places: Sequence[int],
        sizes: Sequence[int],
        stages: Mapping[str, int],
    ) -> None:
        super().__init__(auto_prefix=False)
        self.terms = tuple(
            (_weight(term, kind, stages), filled)
            for term in part.terms
            if (filled := tuple(places[index] for index in term.indices if sizes[places[index]]))
        )
        self.reductions = nn.CellList(
            [
                _Slice(reduction, tuple(places[index] for index in reduction.term.indices))
                for reduction in part.reductions
            ]
        )
        self.weights = tuple(_weight(reduction.term, kind, stages) for reduction in part.reductions)
        self.identity = Tensor([kind.identity], mindspore.float32)
        self.statistic, self.combine = _Statistic(kind), _Combination(kind)
        self.finish = _Finish(part, kind)

    def construct(self, grads: Sequence[Tensor], after: Tensor) -> Tensor:
        found: tuple[Tensor, ...] = (self.identity,)
        for weight, places in self.terms:
            statistics: tuple[Tensor, ...] = ()
            for place in places:
                statistics += (self.statistic(grads[place]),)
            found += (self.combine(mint.cat(statistics)) * weight,)
        for number, reduction in enumerate(self.reductions):
            after = reduction(grads, after)
            if after.size:
                found += (self.statistic(after) * self.weights[number],)
        return self.finish(self.combine(mint.cat(found)), after)


class _Finish(nn.Cell):
    """What the ranks of a part have, combined over its steps."""

    def __init__(self, part: Part, kind: NormKind) -> None:
        super().__init__(auto_prefix=False)
        self.steps = nn.CellList([_Everyone(ranks) for ranks in part.steps])
        self.combine = _Combination(kind)
        self.divisor = part.divisor if kind.reduce_op == "sum" else 1

    def construct(self, statistic: Tensor, after: Tensor) -> Tensor:
        for everyone in self.steps:
            statistic = self.combine(everyone(statistic, after))
        return statistic / self.divisor if self.divisor != 1 else statistic


class _Everyone(nn.Cell):
    """The number of each rank; ``after`` is computed before, so that all ranks exchange in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(auto_prefix=False)
        self.before = ranks.index(rank())
        self.behind = len(ranks) - self.before - 1
        self.all_reduce, self.depend = ops.AllReduce(ops.ReduceOp.SUM, group_name(ranks)), ops.Depend()

    def construct(self, number: Tensor, after: Tensor) -> Tensor:
        row: tuple[Tensor, ...] = (self.depend(number, after),)
        if self.before:
            row = (mint.zeros(self.before), *row)
        if self.behind:
            row = (*row, mint.zeros(self.behind))
        return self.all_reduce(mint.cat(row))


class _Slice(nn.Cell):
    """The elements of reduced Partial gradients that this rank counts."""

    def __init__(self, reduction: Reduction, places: tuple[int, ...]) -> None:
        super().__init__(auto_prefix=False)
        self.places, self.depend = places, ops.Depend()
        self.steps = tuple(
            ops.AllReduce(ops.ReduceOp.SUM, group_name(tuple(sorted(ranks)))) for ranks, _ in reduction.chain
        )
        self.divisor = math.prod(len(ranks) for ranks, reduce_op in reduction.chain if reduce_op == "avg")
        number, ways = 0, 1
        for ranks, _ in reduction.chain:
            number, ways = number * len(ranks) + ranks.index(rank()), ways * len(ranks)
        numel = sum(reduction.numels)
        self.start, self.stop = numel * number // ways, numel * (number + 1) // ways

    def construct(self, grads: Sequence[Tensor], after: Tensor) -> Tensor:
        pieces: tuple[Tensor, ...] = ()
        for place in self.places:
            pieces += (grads[place].reshape(-1).astype(mindspore.float32),)
        reduced = self.depend(mint.cat(pieces), after)
        for all_reduce in self.steps:
            reduced = all_reduce(reduced)
        return reduced[self.start : self.stop] / self.divisor


class _Statistic(nn.Cell):
    """The statistic of a tensor that has elements."""

    def __init__(self, kind: NormKind) -> None:
        super().__init__(auto_prefix=False)
        self.p, self.is_extremum, self.combine = kind.p, math.isinf(kind.p), _Combination(kind)

    def construct(self, tensor: Tensor) -> Tensor:
        flat = tensor.reshape(-1).astype(wide(tensor.dtype))
        if self.is_extremum:
            return self.combine(mint.abs(flat).astype(mindspore.float32))
        if self.p == 0:
            powers = mint.ne(flat, 0.0).astype(mindspore.float32)
        elif self.p == 2:
            powers = mint.square(flat)
        else:
            powers = mint.pow(mint.abs(flat), self.p)
        number = flat.size // _BLOCK * _BLOCK
        if number == 0:
            return mint.sum(powers).reshape(1).astype(mindspore.float32)
        blocks = mint.sum(mint.sum(powers[:number].reshape(-1, _BLOCK), dim=1))
        return (
            (blocks + mint.sum(powers[number:]) if number < flat.size else blocks)
            .reshape(1)
            .astype(mindspore.float32)
        )


class _Combination(nn.Cell):
    """Several numbers as one: their sum, or the largest or smallest, or NaN if one is NaN, which max and min may drop."""

    def __init__(self, kind: NormKind) -> None:
        super().__init__(auto_prefix=False)
        self.is_sum, self.is_largest = kind.reduce_op == "sum", kind.p > 0

    def construct(self, numbers: Tensor) -> Tensor:
        if self.is_sum:
            return mint.sum(numbers).reshape(1)
        end = mint.max(numbers) if self.is_largest else mint.min(numbers)
        poison = mint.sum(mint.isnan(numbers).astype(mindspore.float32))
        return mint.where(poison > 0.0, math.nan, end).reshape(1)


def _weight(term: Term, kind: NormKind, stages: Mapping[str, int]) -> float:
    if kind.reduce_op != "sum":
        return 1.0
    return term.weight / (1 if term.shared is None else stages.get(term.shared, 1))


def wide(dtype: Any) -> Any:
    """The dtype in which gradients of ``dtype`` are computed with."""
    return dtype if dtype == mindspore.float64 else mindspore.float32

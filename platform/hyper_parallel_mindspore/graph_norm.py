"""The total norm as cells for a compiled graph, made from a ``ReductionPlan``; see ``graph``.

A graph knows ``ops.AllReduce`` alone (``mint.distributed`` is for PyNative mode), and on the CPU that adds float32 and
float16 and does nothing else. So each rank adds its number to a row of zeros at its own place: what comes back are the
numbers of all ranks, in the same order and thus with the same sum on each of them, and their largest or smallest as
well, with NaN among them.

``ops.Map`` goes through the gradients: each turn of a loop is a call within the last one to the compiler, which allows
1,000, and 200 gradients had too many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import mindspore
import numpy as np
from mindspore import Tensor, mint, nn, ops

from hyper_parallel.core.norm import NormKind
from hyper_parallel.core.plan import Part, Reduction, ReductionPlan, Term
from hyper_parallel.core.union import Ranks
from hyper_parallel.partials import Piece, buckets
from hyper_parallel_mindspore.block_sums import extremum, statistic, total
from hyper_parallel_mindspore.process_groups import group_name, rank

_BUCKET_NUMEL = 2**24  # 64 MB; not those of 16 MB, as a graph grows with their number


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
        terms = [term for part in plan.parts for term in part.terms]
        counted = {place for term in terms for index in term.indices if sizes[place := places[index]]}
        self.is_counted = tuple(place in counted for place in range(len(sizes)))
        self.map, self.p, self.identity = ops.Map(), kind.p, Tensor([kind.identity], mindspore.float32)
        self.parts = nn.CellList([_Part(part, kind, places, stages) for part in plan.parts])
        self.combine = _Combination(kind)
        self.last = None if plan.last is None else _Finish(plan.last, kind)
        self.exponent = 1.0 if kind.p == 0 or math.isinf(kind.p) else 1 / kind.p

    def construct(self, grads: tuple[Tensor, ...]) -> Tensor:
        measure = ops.partial(_measure, self.p, self.identity)
        statistics = mint.cat((self.identity, *self.map(measure, self.is_counted, grads)))
        found: tuple[Tensor, ...] = ()
        combined = self.identity
        for part in self.parts:
            combined = part(grads, statistics, combined)
            found += (combined,)
        if len(found) > 1:
            combined = self.combine(mint.cat(found))
        if self.last is not None:
            combined = self.last(combined, combined)
        if self.p == 0:
            combined = mint.round(combined)
        return combined.reshape(()) ** self.exponent if self.exponent != 1.0 else combined.reshape(())


class _Part(nn.Cell):
    """One part of the plan; the result is of one element, as all statistics here are."""

    def __init__(self, part: Part, kind: NormKind, places: Sequence[int], stages: Mapping[str, int]) -> None:
        super().__init__(auto_prefix=False)
        weighted = [
            (places[index], _weight(term, kind, stages)) for term in part.terms for index in term.indices
        ]
        # The first of the statistics is the identity.
        self.chosen = Tensor([0, *(place + 1 for place, _ in weighted)], mindspore.int32)
        self.weights = Tensor([1.0, *(weight for _, weight in weighted)], mindspore.float32)
        cut = [
            (_weight(reduction.term, kind, stages), _Bucket(reduction, bucket, places, kind.p))
            for reduction in part.reductions
            for bucket in buckets(reduction.numels, _BUCKET_NUMEL)
        ]
        self.bucket_weights = tuple(weight for weight, _ in cut)
        self.buckets = nn.CellList([bucket for _, bucket in cut])
        self.combine, self.finish = _Combination(kind), _Finish(part, kind)

    def construct(self, grads: tuple[Tensor, ...], statistics: Tensor, after: Tensor) -> Tensor:
        found: tuple[Tensor, ...] = (ops.gather(statistics, self.chosen, 0) * self.weights,)
        for number, bucket in enumerate(self.buckets):
            after = bucket(grads, after)
            found += (after * self.bucket_weights[number],)
        return self.finish(self.combine(mint.cat(found)), after)


class _Finish(nn.Cell):
    """What the ranks of a part have, combined over its steps."""

    def __init__(self, part: Part, kind: NormKind) -> None:
        super().__init__(auto_prefix=False)
        self.steps = nn.CellList([_Everyone(ranks) for ranks in part.steps])
        self.combine = _Combination(kind)
        self.divisor = part.divisor if kind.reduce_op == "sum" else 1

    def construct(self, combined: Tensor, after: Tensor) -> Tensor:
        for everyone in self.steps:
            combined = self.combine(everyone(combined, after))
        return combined / self.divisor if self.divisor != 1 else combined


class _Everyone(nn.Cell):
    """The number of each rank; ``after`` is computed before, so that all ranks exchange in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(auto_prefix=False)
        self.own = Tensor(np.array(ranks) == rank())
        self.zeros = Tensor(np.zeros(len(ranks), np.float32))
        self.all_reduce = ops.AllReduce(ops.ReduceOp.SUM, group_name(ranks))

    def construct(self, number: Tensor, after: Tensor) -> Tensor:
        return self.all_reduce(mint.where(self.own, ops.depend(number, after), self.zeros))


class _Bucket(nn.Cell):
    """The statistic of those elements of a bucket of reduced Partial gradients that this rank counts.

    A bucket is made when the one before is reduced, so that not all of them are there at once.
    """

    def __init__(
        self, reduction: Reduction, bucket: Sequence[Piece], places: Sequence[int], p: float
    ) -> None:
        super().__init__(auto_prefix=False)
        self.map, self.p = ops.Map(), p
        self.places = tuple(places[reduction.term.indices[piece.member]] for piece in bucket)
        self.starts = tuple(piece.start for piece in bucket)
        self.stops = tuple(piece.stop for piece in bucket)
        self.steps = tuple(
            ops.AllReduce(ops.ReduceOp.SUM, group_name(tuple(sorted(ranks)))) for ranks, _ in reduction.chain
        )
        self.divisor = math.prod(len(ranks) for ranks, reduce_op in reduction.chain if reduce_op == "avg")
        number, ways = 0, 1
        for ranks, _ in reduction.chain:
            number, ways = number * len(ranks) + ranks.index(rank()), ways * len(ranks)
        numel = sum(self.stops) - sum(self.starts)
        self.first, self.last = numel * number // ways, numel * (number + 1) // ways
        self.identity = Tensor([NormKind(p).identity], mindspore.float32)

    def construct(self, grads: tuple[Tensor, ...], after: Tensor) -> Tensor:
        pieces = self.map(ops.partial(_piece, grads, after), self.places, self.starts, self.stops)
        reduced = mint.cat(pieces)
        for all_reduce in self.steps:
            reduced = all_reduce(reduced)
        if self.first == self.last:
            return ops.depend(self.identity, reduced)
        return statistic(reduced[self.first : self.last] / self.divisor, self.p)


class _Combination(nn.Cell):
    """Several numbers as one: their sum, or the largest or smallest, or NaN if one is NaN."""

    def __init__(self, kind: NormKind) -> None:
        super().__init__(auto_prefix=False)
        self.is_sum, self.is_largest = kind.reduce_op == "sum", kind.p > 0

    def construct(self, numbers: Tensor) -> Tensor:
        return total(numbers) if self.is_sum else extremum(numbers, self.is_largest)


def _measure(p: float, identity: Tensor, is_counted: bool, gradient: Tensor) -> Tensor:
    return statistic(_flat(gradient), p) if is_counted else identity


def _piece(grads: tuple[Tensor, ...], after: Tensor, place: int, start: int, stop: int) -> Tensor:
    return _flat(ops.depend(grads[place], after))[start:stop]


def _flat(gradient: Tensor) -> Tensor:
    return gradient.astype(mindspore.float32).reshape(-1)  # cast first, as the CPU may not reshape bfloat16


def _weight(term: Term, kind: NormKind, stages: Mapping[str, int]) -> float:
    if kind.reduce_op != "sum":
        return 1.0
    return term.weight / (1 if term.shared is None else stages.get(term.shared, 1))

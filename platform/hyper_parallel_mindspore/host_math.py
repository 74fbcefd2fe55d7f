"""Statistics and scaling on the CPU, by NumPy on the memory of the tensors.

Squares are added up in float32 over 1,024 elements at a time and from there in float64, which is good to 2e-7 for
equal elements, the worst case, and to 1e-9 for others, at the speed of one plain pass. Where squares would leave the
range of float32, the sum shows it, and the tensors are read once more in float64. All other powers are taken in
float64. Nothing larger than a block that fits into the cache is copied.

MindSpore's own kernels would cost a dispatch of up to 190 us for every tensor, lack most operations on bfloat16, and
lose NaN in max and min.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor
from mindspore.common.np_dtype import bfloat16

from hyper_parallel.core.norm import NormKind
from hyper_parallel_mindspore.host_memory import (
    BFLOAT16,
    Array,
    clamp_,
    distinct,
    flatten,
    memory,
    readable,
    scale,
    widened,
)
from hyper_parallel_mindspore.numbers64 import Numbers, as_numbers
from hyper_parallel_mindspore.tensor_math import MindSporeMath, check_foreach, digest, in_kind, whole

_GROUP = 1024
_EXACT_BYTES = 6  # an integer of so many is exact in float64
# Below this mean, single squares may be subnormal in float32 and lose their digits.
_SMALLEST_MEAN = 1e-30


class HostMath(MindSporeMath):
    """The ``TensorMath`` role on the CPU. Scalars and buffers are ``Numbers``: float64 on the host."""

    def statistic(self, tensors: Sequence[Tensor], kind: NormKind, foreach: bool | None) -> Numbers:
        check_foreach(foreach)
        arrays = [memory(tensor) for tensor in tensors]
        if not all(array.flags.c_contiguous for array in arrays):
            distinct(arrays)  # raises now what scale_ would raise
        arrays = [array for array in arrays if array.size]
        if not arrays:
            return as_numbers(kind.identity)
        with np.errstate(all="ignore"):
            if math.isinf(kind.p):
                return as_numbers(_extremum(arrays, largest=kind.p > 0))
            if kind.p == 0:
                return as_numbers(float(sum(np.count_nonzero(block != 0) for block in readable(arrays))))
            return as_numbers(_sum_of_squares(arrays) if kind.p == 2 else _sum_of_powers(arrays, kind.p))

    def pack(self, values: Sequence[Numbers | float], like: Tensor | None) -> Numbers:
        return as_numbers([float(value) for value in values])

    def read(self, buffer: Any, wait: bool) -> list[float] | None:
        array = np.asarray(buffer.asnumpy() if isinstance(buffer, Tensor) else buffer)
        values: list[float] = array.astype(np.float64).reshape(-1).tolist()
        return values

    def where(self, condition: Any, true: Any, false: Any) -> Any:
        chosen = true if bool(condition) else false
        return chosen if isinstance(chosen, Numbers | Tensor) else as_numbers(chosen)

    def cast(self, scalar: Any, dtype: Any, like: Tensor | None) -> Tensor:
        dtype = dtype or mindspore.float32
        values = self.read(whole(scalar), True)
        assert values is not None
        with np.errstate(over="ignore"):
            number = np.array(values[0], np.float64 if dtype == mindspore.float64 else np.float32)
        tensor = Tensor(number)
        return tensor if tensor.dtype == dtype else tensor.astype(dtype)

    def scale_(self, tensors: Sequence[Tensor], coefficient: Tensor, foreach: bool | None) -> None:
        check_foreach(foreach)
        factor = self._factor(coefficient)
        with np.errstate(all="ignore"):
            for array in distinct([memory(tensor) for tensor in tensors]):
                scale(array, factor, out=array)

    def scaled(self, gradients: Sequence[Tensor], coefficient: Tensor) -> list[Tensor]:
        factor = self._factor(coefficient)
        return [in_kind(gradient, _product(gradient, factor)) for gradient in gradients]

    def flatten(
        self, pieces: Sequence[tuple[Tensor | None, int, int]], numel: int, fill: float, like: Tensor | None
    ) -> Numbers:
        buffer = np.empty(numel, np.float32)
        with np.errstate(over="ignore"):
            flatten(pieces, buffer, fill)
        return buffer.view(Numbers)

    def clamp_(self, tensors: Sequence[Tensor], bound: float, foreach: bool | None) -> None:
        check_foreach(foreach)
        with np.errstate(over="ignore"):
            for array in [memory(tensor) for tensor in tensors]:
                clamp_(array, bound)

    def checksum(self, tensor: Tensor) -> Numbers:
        return as_numbers(digest(tensor, _EXACT_BYTES))

    def nonfinite_count(self, tensor: Tensor) -> int:
        return sum(block.size - np.count_nonzero(np.isfinite(block)) for block in readable([memory(tensor)]))

    def _factor(self, coefficient: Any) -> np.float32:
        values = self.read(coefficient, True)
        assert values is not None
        return np.float32(math.nan if math.isnan(values[0]) else values[0])


def _sum_of_squares(arrays: Sequence[Array]) -> float:
    total = math.fsum(_squares(block) for block in readable(arrays))
    if math.isnan(total) or _SMALLEST_MEAN * sum(array.size for array in arrays) < total < math.inf:
        return total
    return float(np.sum([np.dot(row, row) for row in widened(arrays)]))


def _squares(block: Array) -> float:
    flat = block.reshape(-1)  # a copy only of a view with gaps
    if flat.size < _GROUP:
        return float(np.dot(flat, flat))
    number = flat.size // _GROUP * _GROUP
    groups, rest = flat[:number].reshape(-1, 1, _GROUP), flat[number:]
    sums = np.matmul(groups, groups.reshape(-1, _GROUP, 1))
    return float(sums.sum(dtype=np.float64) + np.dot(rest, rest))


def _sum_of_powers(arrays: Sequence[Array], p: float) -> float:
    sums = []
    for row in widened(arrays):
        np.abs(row, out=row)
        if p == 3:
            row *= row * row
        elif p != 1:
            np.power(row, p, out=row)
        sums.append(row.sum())
    return float(np.sum(sums))


def _extremum(arrays: Sequence[Array], largest: bool) -> float:
    """The largest or smallest absolute value; NaN survives all of these operations."""
    if largest:
        return float(np.max([np.maximum(block.max(), -block.min()) for block in readable(arrays)]))
    return float(np.min([np.abs(block).min() for block in readable(arrays)]))


def _product(gradient: Tensor, factor: np.float32) -> Tensor:
    array = np.asarray(gradient.asnumpy())
    is_bfloat16 = gradient.dtype == mindspore.bfloat16
    flat = array.reshape(-1).view(BFLOAT16) if is_bfloat16 else array.reshape(-1)
    product = np.empty_like(flat)
    with np.errstate(all="ignore"):
        scale(flat, factor, out=product)
    return Tensor.from_numpy((product.view(bfloat16) if is_bfloat16 else product).reshape(array.shape))

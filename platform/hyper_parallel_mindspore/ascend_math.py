"""Statistics and scaling on an Ascend NPU, by MindSpore's own operations.

The host waits for the device in ``read(..., wait=True)``, ``checksum`` and ``nonfinite_count`` alone. Scalars are
float32, as HCCL reduces no float64, and a float32 gradient whose squares leave its range gives inf or 0.

All operations are from ``mint``, which is Ascend's, and exist on the CPU as well but for writing in place: the tests
run this module on the CPU, with in-place operations and HCCL's rules simulated. None of it was run on an NPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint

from hyper_parallel.core.norm import NormKind
from hyper_parallel_mindspore.block_sums import extremum, statistic, total
from hyper_parallel_mindspore.tensor_math import MindSporeMath, check_foreach, digest, in_kind, whole

_EXACT_BYTES = 3  # an integer of so many is exact in float32
_CHUNK = 2**24


class AscendMath(MindSporeMath):
    """The ``TensorMath`` role on an NPU. Scalars and buffers are float32 tensors there."""

    def statistic(self, tensors: Sequence[Tensor], kind: NormKind, foreach: bool | None) -> Tensor:
        check_foreach(foreach)
        self.check_in_place(tensors)
        found = [statistic(chunk, kind.p) for tensor in tensors for chunk in _chunks(tensor)]
        if not found:
            return _constant(kind.identity).reshape(())
        values = mint.cat(found)
        return (extremum(values, kind.p > 0) if math.isinf(kind.p) else total(values)).reshape(())

    def pack(self, values: Sequence[Tensor | float], like: Tensor | None) -> Tensor:
        pieces: list[Tensor] = []
        for on_device, run in groupby(values, lambda value: isinstance(value, Tensor)):
            same = list(run)
            pieces += map(_flat, same) if on_device else [_constant(*same)]
        # A new tensor, as it is reduced in place.
        return mint.cat(pieces) if len(pieces) > 1 else pieces[0] * 1.0

    def read(self, buffer: Tensor, wait: bool) -> list[float] | None:
        values: list[float] | None = buffer.reshape(-1).asnumpy().tolist() if wait else None
        return values

    def where(self, condition: Tensor, true: Tensor | float, false: Tensor | float) -> Tensor:
        return mint.where(condition, true, false)

    def cast(self, scalar: Any, dtype: Any, like: Tensor | None) -> Tensor:
        tensor = whole(scalar) if isinstance(scalar, Tensor) else _constant(float(scalar))
        return tensor.reshape(()).astype(dtype or mindspore.float32)

    def scale_(self, tensors: Sequence[Tensor], coefficient: Tensor, foreach: bool | None) -> None:
        check_foreach(foreach)
        for tensor in {_place(tensor): tensor for tensor in tensors}.values():
            if tensor.dtype == mindspore.float32:
                tensor.mul_(coefficient)
            else:  # cast before: from another dtype, copy_ writes to a tensor on an NPU only, not to one on the host
                tensor.copy_((tensor.astype(mindspore.float32) * coefficient).astype(tensor.dtype))

    def scaled(self, gradients: Sequence[Tensor], coefficient: Tensor) -> list[Tensor]:
        return [
            in_kind(gradient, (gradient.astype(mindspore.float32) * coefficient).astype(gradient.dtype))
            for gradient in gradients
        ]

    def flatten(
        self, pieces: Sequence[tuple[Tensor | None, int, int]], numel: int, fill: float, like: Tensor | None
    ) -> Tensor:
        rest = numel - sum(stop - start for _, start, stop in pieces)
        parts = [
            mint.ones(stop - start, dtype=mindspore.float32) * fill
            if tensor is None
            else tensor.reshape(-1)[start:stop].astype(mindspore.float32)
            for tensor, start, stop in (*pieces, (None, 0, rest))
            if stop > start
        ]
        return mint.cat(parts)

    def clamp_(self, tensors: Sequence[Tensor], bound: float, foreach: bool | None) -> None:
        check_foreach(foreach)
        for tensor in tensors:
            if tensor.size:  # not a clamp, which turns NaN into the bound
                wide = tensor.astype(mindspore.float32)
                wide = mint.where(wide > bound, bound, mint.where(wide < -bound, -bound, wide))
                tensor.copy_(wide.astype(tensor.dtype))

    def checksum(self, tensor: Tensor) -> Tensor:
        return Tensor(digest(tensor, _EXACT_BYTES), mindspore.float32)

    def nonfinite_count(self, tensor: Tensor) -> int:
        # Those at fault are counted, not the others: float32 tells no odd number above 2**24 from the next even one.
        return sum(
            int(mint.sum(mint.logical_not(mint.isfinite(chunk)).astype(mindspore.float32)).asnumpy())
            for chunk in _chunks(tensor)
        )


def _constant(*numbers: float) -> Tensor:
    """Numbers on the device, put there once, as a transfer costs the host more than an operation. Never written to."""
    return _transferred(np.array(numbers, np.float32).tobytes())


@lru_cache(maxsize=64)
def _transferred(numbers: bytes) -> Tensor:
    """By their bytes, as 0.0 and -0.0 are equal."""
    return Tensor(np.frombuffer(numbers, np.float32).copy())


def _flat(scalar: Tensor) -> Tensor:
    return scalar.reshape(1).astype(mindspore.float32)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same elements.

    ``data_ptr`` waits until all operations are handed to the device, not for their results, and is 0 for a tensor that
    has not been there yet (``TensorPybind::DataPtr`` in MindSpore's sources).
    """
    return (
        tensor.data_ptr() or id(tensor),
        tensor.size,
        () if tensor.is_contiguous() else tuple(tensor.stride()),
    )


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Float32 pieces of bounded size, so that no operation copies a whole gradient; none of an empty tensor."""
    if tensor.size:
        for chunk in mint.split(tensor.reshape(-1), _CHUNK):
            yield chunk.astype(mindspore.float32)

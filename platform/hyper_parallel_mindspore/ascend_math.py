"""Statistics and scaling on an Ascend NPU, by MindSpore's own operations; nothing here waits for the device.

There is no float64, so scalars are float32, and a float32 gradient whose squares leave its range gives inf or 0.
The operations were run on the CPU, where all but the scaling in place exist; none of this was run on an NPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint

from hyper_parallel.core.norm import NormKind
from hyper_parallel_mindspore.gradients import check_strides, check_tensor
from hyper_parallel_mindspore.tensor_math import MindSporeMath, check_foreach, digest, in_kind, whole

_BLOCK = 4096
_EXACT_BYTES = 3  # an integer of so many is exact in float32
_CHUNK = _BLOCK * 4096


class AscendMath(MindSporeMath):
    """The ``TensorMath`` role on an NPU. Scalars and buffers are float32 tensors there."""

    def statistic(self, tensors: Sequence[Tensor], kind: NormKind, foreach: bool | None) -> Tensor:
        check_foreach(foreach)
        for tensor in tensors:
            check_tensor(tensor)
            if not tensor.is_contiguous():
                check_strides(tensor)
        found = [_statistic(chunk, kind.p) for tensor in tensors for chunk in _chunks(tensor)]
        if not found:
            return Tensor(kind.identity, mindspore.float32)
        values = mint.cat(found)
        if math.isinf(kind.p):
            return _extremum(values, largest=kind.p > 0).reshape(())
        return mint.sum(values)

    def pack(self, values: Sequence[Tensor | float], like: Tensor | None) -> Tensor:
        pieces: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                pieces.append(value.reshape(1).astype(mindspore.float32))
            elif pieces and isinstance(pieces[-1], list):
                pieces[-1].append(float(value))
            else:
                pieces.append([float(value)])
        return mint.cat(
            [Tensor(piece, mindspore.float32) if isinstance(piece, list) else piece for piece in pieces]
        )

    def read(self, buffer: Tensor, wait: bool) -> list[float] | None:
        values: list[float] | None = buffer.reshape(-1).asnumpy().tolist() if wait else None
        return values

    def where(self, condition: Tensor, true: Tensor | float, false: Tensor | float) -> Tensor:
        return mint.where(condition, true, false)

    def cast(self, scalar: Any, dtype: Any, like: Tensor | None) -> Tensor:
        tensor = whole(scalar) if isinstance(scalar, Tensor) else Tensor(scalar, mindspore.float32)
        return tensor.reshape(()).astype(dtype or mindspore.float32)

    def scale_(self, tensors: Sequence[Tensor], coefficient: Tensor, foreach: bool | None) -> None:
        check_foreach(foreach)
        for tensor in {_place(tensor): tensor for tensor in tensors}.values():
            if tensor.dtype == mindspore.float32:
                tensor.mul_(coefficient)
            else:
                tensor.copy_(tensor.astype(mindspore.float32) * coefficient)

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
                tensor.copy_(mint.where(tensor > bound, bound, mint.where(tensor < -bound, -bound, tensor)))

    def checksum(self, tensor: Tensor) -> Tensor:
        return Tensor(digest(tensor, _EXACT_BYTES), mindspore.float32)

    def nonfinite_count(self, tensor: Tensor) -> int:
        if not tensor.size:
            return 0
        finite = mint.isfinite(tensor.astype(mindspore.float32)).astype(mindspore.float32)
        return int(tensor.size - mint.sum(finite).asnumpy())


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same elements."""
    return tensor.data_ptr(), tensor.size, () if tensor.is_contiguous() else tuple(tensor.stride())


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Float32 pieces of bounded size, so that no operation copies a whole gradient; none of an empty tensor."""
    if tensor.size:
        for chunk in mint.split(tensor.reshape(-1), _CHUNK):
            yield chunk.astype(mindspore.float32)


def _statistic(chunk: Tensor, p: float) -> Tensor:
    """One number, or one for each block, as a sum over a whole chunk may drift."""
    if math.isinf(p):
        return _extremum(mint.abs(chunk), largest=p > 0)
    if p == 0:
        powers = mint.ne(chunk, 0.0).astype(mindspore.float32)
    else:
        powers = mint.square(chunk) if p == 2 else mint.pow(mint.abs(chunk), p)
    number = chunk.size // _BLOCK * _BLOCK
    sums = [mint.sum(powers[:number].reshape(-1, _BLOCK), dim=1)] if number else []
    if number < chunk.size:
        sums.append(mint.sum(powers[number:]).reshape(1))
    return mint.cat(sums) if len(sums) > 1 else sums[0]


def _extremum(values: Tensor, largest: bool) -> Tensor:
    """The largest or smallest, or NaN if that is among them: max and min alone may drop it."""
    end = mint.max(values) if largest else mint.min(values)
    poison = mint.sum(mint.isnan(values).astype(mindspore.float32))
    return mint.where(poison > 0, math.nan, end).reshape(1)

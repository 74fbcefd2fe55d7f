"""NumPy arrays over the memory of MindSpore tensors on the CPU.

An array costs 2 us and an operation of MindSpore up to 190 us, and only through such an array can a view be changed
in place: ``Tensor.mul_`` returns a new tensor on the CPU, and ``copy_`` through a slice changes nothing.
``Tensor.data_ptr`` waits for all operations that are under way.

NumPy has no bfloat16. Its bits are the upper half of a float32's, and its arrays here hold them as uint16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from hyper_parallel_mindspore.gradients import check_strides, check_tensor
from hyper_parallel_mindspore.numbers64 import Numbers

Array = NDArray[Any]

BFLOAT16 = np.dtype(np.uint16)
_DTYPES: dict[Any, np.dtype[Any]] = {
    mindspore.float32: np.dtype(np.float32),
    mindspore.float16: np.dtype(np.float16),
    mindspore.float64: np.dtype(np.float64),
    mindspore.bfloat16: BFLOAT16,
}
_BLOCK = 65536


class _Memory:
    """What NumPy needs to know to see memory as an array; ``owner`` keeps it from being freed."""

    def __init__(
        self,
        owner: object,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": dtype.str,
            "strides": strides,
            "version": 3,
        }


def memory(tensor: Any) -> Array:
    """The memory of a tensor: one dimension if it is dense, else the shape and the strides of the view.

    A flat buffer of ``Numbers`` is its own memory.

    Raises:
        TypeError: it is no MindSpore tensor, or of a dtype that gradients do not have.
        ValueError: it is expanded (stride 0), so that scaling it in place would scale elements repeatedly.
    """
    if isinstance(tensor, Numbers):
        return np.asarray(tensor)
    check_tensor(tensor)
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"a gradient has dtype {tensor.dtype}; supported are {', '.join(map(str, _DTYPES))}")
    shape = tuple(tensor.shape)
    size = math.prod(shape)
    if not size:
        return np.empty(0, dtype)
    if tensor.is_contiguous():
        return np.asarray(_Memory(tensor, tensor.data_ptr(), (size,), dtype))
    check_strides(tensor)
    # not Tensor.strides: that is computed from the shape, whatever the view
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    array = np.asarray(_Memory(tensor, tensor.data_ptr(), shape, dtype, strides))
    array = array.transpose(sorted(range(array.ndim), key=lambda dim: -strides[dim]))
    return array.reshape(-1) if array.flags.c_contiguous else array


def blocks(array: Array) -> Iterator[Array]:
    """Views of bounded size that make up the array."""
    if array.size <= _BLOCK:
        yield array
        return
    rows = _BLOCK // (array.size // len(array))
    if not rows:
        for row in array:
            yield from blocks(row)
        return
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def readable(arrays: Sequence[Array]) -> Iterator[Array]:
    """The elements in blocks of float32 or float64, not to be written to: the memory itself, where it is of these."""
    halves = [array.size for array in arrays if array.dtype.itemsize == 2]
    buffer = np.empty(min(max(halves, default=0), _BLOCK), np.float32)
    for array in arrays:
        for block in blocks(array):
            yield block if block.dtype.itemsize > 2 else _float32(block, buffer)


def widened(arrays: Sequence[Array]) -> Iterator[NDArray[np.float64]]:
    """The elements in rows of float64, each in the same buffer, which may be written to."""
    wide = np.empty(min(max(array.size for array in arrays), _BLOCK))
    for block in readable(arrays):
        row = wide[: block.size]
        np.copyto(row.reshape(block.shape), block)
        yield row


def in_order(tensor: Any) -> Array:
    """The elements in the order of their indices, flat; a copy only of a view that lies otherwise in memory.

    Raises:
        TypeError, ValueError: as ``memory``.
    """
    held = memory(tensor)
    if isinstance(tensor, Numbers) or tensor.is_contiguous() or not held.size:
        return held
    return np.asarray(tensor.asnumpy()).reshape(-1).view(held.dtype)


def flatten(
    pieces: Sequence[tuple[Tensor | None, int, int]], buffer: NDArray[np.float32], fill: float
) -> None:
    """Fill ``buffer`` with elements start to stop of each tensor; ``fill`` stands for missing ones and at the end."""
    position = 0
    for tensor, start, stop in pieces:
        target = buffer[position : position + stop - start]
        if tensor is None:
            target[...] = fill
        else:
            for block, part in zip(blocks(in_order(tensor)[start:stop]), blocks(target), strict=True):
                part[...] = _float32(block, part) if block.dtype == BFLOAT16 else block
        position += stop - start
    buffer[position:] = fill


def scale(array: Array, coefficient: np.float32, out: Array) -> None:
    """Write the products with ``coefficient`` to ``out``, of the same shape, rounding each once."""
    if array.dtype != BFLOAT16:
        kind = np.result_type(array.dtype, np.float32)
        np.multiply(array, coefficient, out=out, dtype=kind, casting="same_kind")
        return
    product, spare = np.empty((2, min(array.size, _BLOCK)), np.float32)
    for block, target in zip(blocks(array), blocks(out), strict=True):
        values = _float32(block, product)
        np.multiply(values, coefficient, out=values)
        _round(values, spare, target)


def clamp_(array: Array, bound: float) -> None:
    """Clamp in place to between ``-bound`` and ``bound``, as the dtype of the array has them; NaN stays."""
    if array.dtype != BFLOAT16:
        limit = array.dtype.type(bound)
        np.clip(array, -limit, limit, out=array)
        return
    values, spare = np.empty((2, min(array.size, _BLOCK)), np.float32)
    for block in blocks(array):
        row = _float32(block, values)
        np.clip(row, -np.float32(bound), np.float32(bound), out=row)
        _round(row, spare, block)


def distinct(arrays: Sequence[Array]) -> list[Array]:
    """Arrays that hold each element of ``arrays`` once, however these overlap.

    Raises:
        ValueError: a sparse view shares some of its elements with another array, or overlapping ones differ in dtype.
    """
    dense = sorted(
        (array for array in arrays if array.ndim == 1 and array.flags.c_contiguous and array.size), key=_start
    )
    sparse = {
        (_start(array), array.shape, array.strides): array for array in arrays if not array.flags.c_contiguous
    }
    runs: list[Array] = []
    for array in dense:
        if not runs or _start(array) >= _end(runs[-1]):
            runs.append(array)
        elif array.dtype != runs[-1].dtype:
            raise ValueError(
                f"gradients of dtypes {array.dtype} and {runs[-1].dtype} share memory, "
                "so they cannot be scaled in place"
            )
        elif _end(array) > _end(runs[-1]):
            first = runs.pop()
            length = (_end(array) - _start(first)) // array.itemsize
            runs.append(np.asarray(_Memory((first, array), _start(first), (length,), array.dtype)))
    views = list(sparse.values())
    for index, view in enumerate(views):
        if any(np.shares_memory(view, other) for other in (*runs, *views[:index])):
            raise ValueError(
                f"a gradient is a view of shape {view.shape} with strides {view.strides} bytes whose "
                "elements belong to another gradient, too, so they cannot be scaled in place; pass copies"
            )
    return runs + views


def _start(array: Array) -> int:
    return array.ctypes.data


def _end(array: Array) -> int:
    return array.ctypes.data + array.nbytes


def _float32(block: Array, buffer: NDArray[np.float32]) -> NDArray[np.float32]:
    """A block of a 16-bit dtype as float32, in ``buffer``."""
    values = buffer[: block.size].reshape(block.shape)
    if block.dtype != BFLOAT16:
        np.copyto(values, block)
        return values
    bits = values.view(np.uint32)
    np.copyto(bits, block)
    np.left_shift(bits, 16, out=bits)
    return values


def _round(values: NDArray[np.float32], spare: NDArray[np.float32], target: Array) -> None:
    """Write the nearest bfloat16, the even one of two that are as near; ``values`` is used up.

    A NaN stays one: with the lower half of its bits zero, as in all products here, nothing is carried upwards.
    """
    bits = values.view(np.uint32)
    half = spare.view(np.uint32)[: bits.size].reshape(bits.shape)
    np.right_shift(bits, 16, out=half)
    np.bitwise_and(half, 1, out=half)
    np.add(half, 0x7FFF, out=half)
    np.add(bits, half, out=bits)
    np.right_shift(bits, 16, out=bits)
    target[...] = bits

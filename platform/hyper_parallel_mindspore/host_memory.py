"""NumPy arrays over the memory of MindSpore tensors on the CPU.

An array costs 2 us and an operation of MindSpore up to 190 us, and only through such an array can a view be changed
in place: ``Tensor.mul_`` returns a new tensor on the CPU, and ``copy_`` through a slice changes nothing.
``Tensor.data_ptr`` waits for all operations that are under way.

NumPy has no bfloat16. Its bits are the upper half of a float32's, and its arrays here are uint16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

Array = NDArray[Any]

BFLOAT16 = np.dtype(np.uint16)
_DTYPES = {
    mindspore.float32: np.dtype(np.float32),
    mindspore.float16: np.dtype(np.float16),
    mindspore.float64: np.dtype(np.float64),
    mindspore.bfloat16: BFLOAT16,
}
_BLOCK = 32768
_QUIET_NAN = 0x7FC0


class _Memory:
    """What NumPy needs to know to see memory as an array; ``owner`` keeps it from being freed."""

    def __init__(self, owner: object, address: int, shape: tuple[int, ...], dtype: np.dtype[Any],
                 strides: tuple[int, ...] | None = None) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": dtype.str,
                                    "strides": strides, "version": 3}


def memory(tensor: Any) -> Array:
    """The memory of a tensor: one dimension if it is dense, else the shape and the strides of the view.

    Raises:
        TypeError: it is no MindSpore tensor, or of a dtype that gradients do not have.
        ValueError: it is expanded (stride 0), so that scaling it in place would scale elements repeatedly.
    """
    if not isinstance(tensor, Tensor):
        kind = type(tensor)
        raise TypeError(f"a gradient is a {kind.__module__}.{kind.__qualname__}, but the platform is mindspore, "
                        "which expects mindspore.Tensor")
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"a gradient has dtype {tensor.dtype}; supported are {', '.join(map(str, _DTYPES))}")
    shape = tuple(tensor.shape)
    size = math.prod(shape)
    if not size:
        return np.empty(0, dtype)
    if tensor.is_contiguous():
        return np.asarray(_Memory(tensor, tensor.data_ptr(), (size,), dtype))
    strides = tuple(tensor.strides)
    if any(stride == 0 and length > 1 for length, stride in zip(shape, strides, strict=True)):
        raise ValueError(f"a gradient of shape {shape} is expanded (strides {tuple(tensor.stride())}): its elements "
                         "share memory and cannot be scaled in place; pass gradient.contiguous()")
    array = np.asarray(_Memory(tensor, tensor.data_ptr(), shape, dtype, strides))
    in_order = array.transpose(sorted(range(array.ndim), key=lambda dim: -array.strides[dim]))
    return in_order.reshape(-1) if in_order.flags.c_contiguous else in_order


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
        yield array[start:start + rows]


def widened(arrays: Sequence[Array]) -> Iterator[NDArray[np.float64]]:
    """The elements in rows of float64, each in the same buffer, which may be changed."""
    largest = min(max(array.size for array in arrays), _BLOCK)
    wide, bits = np.empty(largest), np.empty(largest, np.uint32)
    for array in arrays:
        for block in blocks(array):
            row = wide[:block.size]
            np.copyto(row.reshape(block.shape), _float32(block, bits) if block.dtype == BFLOAT16 else block)
            yield row


def scale_(array: Array, coefficient: np.float32) -> None:
    """Multiply in place by ``coefficient``, rounding each product once."""
    if array.dtype != BFLOAT16:
        kind = np.result_type(array.dtype, np.float32)
        np.multiply(array, coefficient, out=array, dtype=kind, casting="same_kind")
        return
    bits = np.empty(min(array.size, _BLOCK), np.uint32)
    for block in blocks(array):
        product = _float32(block, bits)
        np.multiply(product, coefficient, out=product)
        block[...] = _rounded(product)


def distinct(arrays: Sequence[Array]) -> list[Array]:
    """Arrays that hold each element of ``arrays`` once, however these overlap.

    Raises:
        ValueError: a sparse view shares some of its elements with another array, or overlapping ones differ in dtype.
    """
    dense = sorted((array for array in arrays if array.ndim == 1 and array.flags.c_contiguous and array.size),
                   key=_start)
    sparse = {(_start(array), array.shape, array.strides): array for array in arrays
              if not array.flags.c_contiguous}
    runs: list[Array] = []
    for array in dense:
        if not runs or _start(array) >= _end(runs[-1]):
            runs.append(array)
        elif array.dtype != runs[-1].dtype:
            raise ValueError(f"gradients of dtypes {array.dtype} and {runs[-1].dtype} share memory, "
                             "so they cannot be scaled in place")
        elif _end(array) > _end(runs[-1]):
            first = runs.pop()
            length = (_end(array) - _start(first)) // array.itemsize
            runs.append(np.asarray(_Memory((first, array), _start(first), (length,), array.dtype)))
    views = list(sparse.values())
    for index, view in enumerate(views):
        if any(np.shares_memory(view, other) for other in (*runs, *views[:index])):
            raise ValueError(f"a gradient is a view of shape {view.shape} with strides {view.strides} bytes whose "
                             "elements belong to another gradient, too, so they cannot be scaled in place; pass copies")
    return runs + views


def _start(array: Array) -> int:
    return array.ctypes.data


def _end(array: Array) -> int:
    return array.ctypes.data + array.nbytes


def _float32(block: Array, buffer: NDArray[np.uint32]) -> NDArray[np.float32]:
    """A bfloat16 block as float32, in ``buffer``."""
    bits = buffer[:block.size].reshape(block.shape)
    np.copyto(bits, block)
    np.left_shift(bits, 16, out=bits)
    return bits.view(np.float32)


def _rounded(values: NDArray[np.float32]) -> Array:
    """The bits of the nearest bfloat16, the even one of two that are as near."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), _QUIET_NAN, rounded).astype(np.uint16)

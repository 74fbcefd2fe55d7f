"""What both kinds of arithmetic, on the CPU and on an Ascend NPU, have in common."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.interface import LAYOUT_ATTRIBUTE
from hyper_parallel_mindspore.dtensor import DTensor, attached_layout
from hyper_parallel_mindspore.gradients import check_strides, check_tensor


class MindSporeMath:
    """The part of the ``TensorMath`` role that does not depend on the device."""

    def promoted_dtype(self, tensors: Sequence[Tensor]) -> Any:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) == 1:
            return dtypes.pop()
        return mindspore.float64 if mindspore.float64 in dtypes else mindspore.float32

    def check_in_place(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            check_tensor(tensor)
            if not tensor.is_contiguous():
                check_strides(tensor)


def digest(tensor: Tensor, num_bytes: int) -> float:
    """An integer made of the elements, the same on every rank that holds the same; waits for the device."""
    data = np.ascontiguousarray(tensor.asnumpy()).tobytes()
    return float(int.from_bytes(blake2b(data, digest_size=num_bytes).digest(), "big"))


def check_foreach(foreach: bool | None) -> None:
    """Raise RuntimeError if foreach kernels are asked for."""
    if foreach:
        raise RuntimeError("foreach=True was passed, but MindSpore exposes no foreach kernels")


def whole(value: Any) -> Any:
    """The global tensor of a DTensor; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def in_kind(gradient: Tensor, product: Tensor) -> Tensor:
    """``product`` with the layout of ``gradient``, in the way in which that has it."""
    layout = attached_layout(gradient)
    if isinstance(gradient, DTensor):
        return DTensor(product, layout)
    if layout is not None:
        setattr(product, LAYOUT_ATTRIBUTE, layout)
    return product

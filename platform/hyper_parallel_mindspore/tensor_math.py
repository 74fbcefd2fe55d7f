"""What both kinds of arithmetic, on the CPU and on an Ascend NPU, have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import Tensor

from hyper_parallel_mindspore.dtensor import DTensor


class MindSporeMath:
    """The part of the ``TensorMath`` role that does not depend on the device."""

    def promoted_dtype(self, tensors: Sequence[Tensor]) -> Any:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) == 1:
            return dtypes.pop()
        return mindspore.float64 if mindspore.float64 in dtypes else mindspore.float32


def check_foreach(foreach: bool | None) -> None:
    if foreach:
        raise RuntimeError("foreach=True was passed, but MindSpore exposes no foreach kernels")


def like(gradient: Tensor, product: Tensor) -> Tensor:
    """``product`` with the layout of ``gradient``, of whatever kind that is."""
    if isinstance(gradient, DTensor):
        return DTensor(product, gradient.layout)
    if (layout := attached_layout(gradient)) is not None:
        setattr(product, LAYOUT_ATTRIBUTE, layout)
    return product

"""What a gradient has to be, on any device."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor


def check_tensor(gradient: Any) -> None:
    """Raise TypeError if it is no MindSpore tensor, naming both frameworks."""
    if not isinstance(gradient, Tensor):
        kind = type(gradient)
        raise TypeError(
            f"a gradient is a {kind.__module__}.{kind.__qualname__}, but the platform is mindspore, "
            "which expects mindspore.Tensor"
        )


def check_strides(gradient: Tensor) -> None:
    """Raise ValueError if it is expanded (stride 0): scaled in place, its elements would be scaled repeatedly."""
    strides = tuple(gradient.stride())
    if any(stride == 0 and size > 1 for size, stride in zip(gradient.shape, strides, strict=True)):
        raise ValueError(
            f"a gradient of shape {tuple(gradient.shape)} is expanded (strides {strides}): its elements "
            "share memory and cannot be scaled in place; pass gradient.contiguous()"
        )

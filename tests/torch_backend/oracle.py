"""Norms and clipped gradients in NumPy float64, from the gradients as they are stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 1e-6}
"""What one rounding to the dtype may change, relative; float64 gradients meet a float32 coefficient."""


def graded(gradient: torch.Tensor) -> torch.nn.Parameter:
    """A parameter that has this very tensor as its gradient."""
    parameter = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def wide(tensor: torch.Tensor) -> np.ndarray:
    """A copy of the values in double precision, in the order of the indices."""
    double = torch.complex128 if tensor.is_complex() else torch.float64
    return np.array(tensor.detach().to(double).numpy(), copy=True)


def norm_of(arrays: Iterable[np.ndarray], p: float) -> float:
    """The p-norm of all elements, scaled by the largest so that no power leaves float64."""
    values = np.abs(np.concatenate([np.ravel(array) for array in arrays]))
    if math.isinf(p):
        return float(values.max() if p > 0 else values.min())
    if p == 0:
        return float(np.count_nonzero(values))
    largest = float(values.max())
    if largest == 0:
        return 0.0
    return largest * float(np.sum((values / largest) ** p)) ** (1 / p)


def factor(norm: float, max_norm: float) -> float:
    return min(1.0, max_norm / (norm + 1e-6))


def assert_scaled(after: Sequence[torch.Tensor], before: Sequence[np.ndarray], coefficient: float) -> None:
    """Each gradient is its product with the coefficient, rounded once to its dtype."""
    for gradient, values in zip(after, before, strict=True):
        exact = values * coefficient
        dtype = gradient.dtype.to_real()
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        np.testing.assert_allclose(wide(gradient), exact, rtol=ROUNDING[dtype], atol=smallest)

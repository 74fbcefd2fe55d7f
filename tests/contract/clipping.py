"""Gradients to clip and what the right answer for them is, for the public calls on every backend."""

from __future__ import annotations

import math

import numpy as np

from tests.contract.backends import Kit

ORDERS = (2.0, 1.0, 3.0, math.inf, -math.inf, 0.0, 0.5, -1.0)
VALUES = (np.array([3.0, -4.0, 0.5]), np.array([[1.0, 2.0], [-2.0, 0.25]]), np.array(-7.0))


def graded(kit: Kit, dtype: str = "float32") -> list:
    return [kit.graded(values, dtype) for values in VALUES]


def gradients(kit: Kit, parameters: list) -> list[np.ndarray]:
    return [kit.array(parameter.grad) for parameter in parameters]


def factor(max_norm: float, norm: float) -> float:
    return min(1.0, max_norm / (norm + 1e-6))


def assert_clipped(
    kit: Kit, found: list, originals: tuple, coefficient: float, dtype: str = "float32"
) -> None:
    """Each of ``found`` is the original times the coefficient, up to rounding of the result and the coefficient."""
    tolerance = {"float16": 1e-3, "bfloat16": 8e-3}.get(dtype, 1e-6)
    for tensor, original in zip(found, originals, strict=True):
        assert kit.dtype(tensor) == dtype
        np.testing.assert_allclose(kit.array(tensor), original * coefficient, rtol=tolerance, atol=0)


def untouched(kit: Kit, parameters: list, originals=VALUES) -> bool:
    pairs = zip(gradients(kit, parameters), originals, strict=True)
    return all(np.array_equal(found, original, equal_nan=True) for found, original in pairs)

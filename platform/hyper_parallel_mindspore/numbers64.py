"""Float64 numbers on the host, and their passage through an all-reduce that knows no float64.

MCCL adds and compares int64 exactly, so a float64 travels as int64: for MAX as its bits in an order that integers
share, for SUM as a fixed-point number of 42 limbs that cover all of float64's range. Nothing is rounded on the way,
so the order in which ranks are added does not matter and every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A mantissa of 53 bits, wherever it starts, touches two limbs; 11 bits of an int64 are left for sign and carries.
_LIMB_BITS = 52
_NUM_LIMBS = 42
# The exponent of the lowest bit: that of the smallest subnormal, with room for the zeros that lead its mantissa.
_LOWEST = -1126
_NUM_FLAGS = 3  # how many addends are NaN, inf and -inf
_SIGN_BIT = np.int64(-(1 << 63))

MAX_ADDENDS = 2**11 - 1


class Numbers(np.ndarray[Any, np.dtype[Any]]):
    """An array (of float64, mostly) that meets NaN, overflow and division by zero without a warning, as a tensor does.

    What is computed from one, and what is taken out of one, is one again, of no dimension if it is a single number.
    """

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        with np.errstate(all="ignore"):
            result = getattr(ufunc, method)(*map(np.asarray, inputs), **options)
        return np.asarray(result).view(Numbers)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(np.asarray(self)[index]).view(Numbers)


def as_numbers(value: Sequence[float] | float) -> Numbers:
    """One number, or a row of them."""
    return np.asarray(value, np.float64).view(Numbers)


def encode(values: Numbers, reduce_op: str) -> NDArray[np.int64]:
    """Integers whose element-wise ``sum`` or ``max`` over at most ``MAX_ADDENDS`` ranks is that of ``values``."""
    plain = np.asarray(values)
    return _limbs(plain).reshape(-1) if reduce_op == "sum" else _ordered(plain)


def decode(integers: NDArray[np.int64], reduce_op: str) -> Numbers:
    """The numbers that reduced integers stand for, correct to a few units in float64's last place."""
    if reduce_op == "sum":
        return _from_limbs(integers.reshape(-1, _NUM_FLAGS + _NUM_LIMBS)).view(Numbers)
    return _flipped(integers).view(np.float64).view(Numbers)


def _limbs(values: NDArray[np.float64]) -> NDArray[np.int64]:
    rows = np.arange(values.size)
    mantissa, exponent = np.frexp(np.where(np.isfinite(values), values, 0.0))
    whole = np.abs(np.ldexp(mantissa, 53)).astype(np.int64)
    limb, bit = np.divmod(exponent.astype(np.int64) - 53 - _LOWEST, _LIMB_BITS)
    limb, bit = np.where(whole, limb, 0), np.where(whole, bit, 0)
    low = (whole & (((1 << _LIMB_BITS) - 1) >> bit)) << bit
    sign = np.where(values < 0, -1, 1)
    table = np.zeros((values.size, _NUM_FLAGS + _NUM_LIMBS), np.int64)
    table[:, 0], table[:, 1], table[:, 2] = np.isnan(values), values == np.inf, values == -np.inf
    table[rows, _NUM_FLAGS + limb] = sign * low
    table[rows, _NUM_FLAGS + limb + 1] = sign * (whole >> (_LIMB_BITS - bit))
    return table


def _from_limbs(table: NDArray[np.int64]) -> NDArray[np.float64]:
    nan, positive, negative = (table[:, flag] > 0 for flag in range(_NUM_FLAGS))
    weights = _LOWEST + _LIMB_BITS * np.arange(_NUM_LIMBS, dtype=np.int32)
    with np.errstate(all="ignore"):
        total = np.ldexp(table[:, _NUM_FLAGS:].astype(np.float64), weights).sum(axis=1)
    total = np.where(positive, np.inf, np.where(negative, -np.inf, total))
    return np.where(nan | (positive & negative), np.nan, total)


def _ordered(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Integers in the order of the numbers; NaN comes last."""
    return _flipped(np.where(np.isnan(values), np.nan, values).view(np.int64))


def _flipped(bits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sign and magnitude to two's complement, and back."""
    return np.where(bits < 0, bits ^ ~_SIGN_BIT, bits)

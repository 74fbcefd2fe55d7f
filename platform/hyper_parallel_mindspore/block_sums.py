"""Statistics by operations of ``mint``, for NPUs and for compiled graphs.

Numbers are added up in blocks of blocks, as a kernel may add those of a row one after another: of 2e7 equal elements,
the worst case, a norm over rows of 4,096 was off by 2.5e-6 on the CPU, and over rows of 512 it is by less than 1e-6.
"""

from __future__ import annotations

import math

import mindspore
from mindspore import Tensor, mint

_BLOCK = 512


def statistic(values: Tensor, p: float) -> Tensor:
    """That of a flat float32 tensor with at least one element; the result has one, too."""
    if p in (math.inf, -math.inf):
        return extremum(mint.abs(values), p > 0)
    if p == 0:
        return total(mint.ne(values, 0.0).astype(mindspore.float32))
    return total(mint.square(values) if p == 2 else mint.pow(mint.abs(values), p))


def total(values: Tensor) -> Tensor:
    """The sum of a flat tensor, as a tensor of one element."""
    while values.size > _BLOCK:
        number = values.size // _BLOCK * _BLOCK
        sums = mint.sum(values[:number].reshape(-1, _BLOCK), dim=1)
        values = mint.cat((sums, values[number:])) if number < values.size else sums
    return mint.sum(values).reshape(1)


def extremum(values: Tensor, largest: bool) -> Tensor:
    """The largest or smallest, or NaN if that is among them: max and min alone may drop it."""
    end = mint.max(values) if largest else mint.min(values)
    poison = mint.sum(mint.isnan(values).astype(mindspore.float32))
    return mint.where(poison > 0.0, math.nan, end).reshape(1)

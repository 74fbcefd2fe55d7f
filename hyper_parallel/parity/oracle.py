"""What is right: NumPy float64 on unsharded gradients, independent of the rest of the library.

Sharding is repeated here from its definition (chunks of ceil(size / n), cut from left to right) with index
arrays, not taken from ``core.layout``, so that an error there cannot hide itself.
"""

from __future__ import annotations

import math
import zlib
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.core.placement import Partial, Replicate, Shard, StridedShard
from hyper_parallel.parity.cases import Case, Tensor

Array: TypeAlias = NDArray[Any]

# Distance between 1 and the next number: the relative size of one unit in the last place.
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


_REDUCED: dict[str, Any] = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum}
_IDENTITY = {"sum": 0.0, "avg": 0.0, "max": -math.inf, "min": math.inf}


def gradient_terms(case: Case, index: int, rank: int) -> Array:
    """The unsharded gradient of a tensor as ``rank`` would hold it; terms of a Partial one differ along its dims.

    float32, with values that the tensor's dtype holds exactly; every other case has zeros.
    """
    tensor, here = case.tensors[index], case.coordinate(rank)
    partial = [
        here[name]
        for name, p in zip(tensor.mesh_dims, tensor.placements, strict=True)
        if isinstance(p, Partial)
    ]
    zeros = 0.1 * (zlib.crc32(case.name.encode()) % 2)
    rng = np.random.default_rng([zlib.crc32(case.name.encode()), index, *partial])
    values = rng.standard_normal(tensor.shape) * (rng.random(tensor.shape) >= zeros) * tensor.scale
    return rounded(np.asarray(values), tensor.dtype).astype(np.float32)


def local_gradient(case: Case, index: int, rank: int) -> Array:
    """What ``rank`` holds of the gradient, missing or not."""
    return local_part(gradient_terms(case, index, rank), local_indices(case, case.tensors[index], rank))


def rounded(values: Array, dtype: str) -> Array:
    """float64 ``values`` rounded to the nearest of ``dtype``, ties to even."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float64)
    bits: Array = np.atleast_1d(values.astype(np.float32)).view(np.uint32).astype(np.int64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64).reshape(values.shape)


def local_indices(case: Case, tensor: Tensor, rank: int) -> tuple[Array, ...]:
    """Per dimension of the tensor, the global indices that ``rank`` holds, for ``np.ix_``."""
    coordinate, sizes = case.coordinate(rank), case.sizes()
    held = [np.arange(size) for size in tensor.shape]
    for name, placement in zip(tensor.mesh_dims, tensor.placements, strict=True):
        if isinstance(placement, Shard | StridedShard):
            pieces = placement.split_factor if isinstance(placement, StridedShard) else 1
            blocks = [
                _chunk(block, sizes[name], coordinate[name])
                for block in (_chunk(held[placement.dim], pieces, piece) for piece in range(pieces))
            ]
            held[placement.dim] = np.concatenate(blocks)
    return tuple(held)


def _chunk(indices: Array, number: int, index: int) -> Array:
    size = math.ceil(len(indices) / number)
    return indices[index * size : (index + 1) * size]


def local_part(array: Array, indices: tuple[Array, ...]) -> Array:
    """The elements at ``indices``; a 0-d array is held whole."""
    return array[np.ix_(*indices)] if indices else array


def total_norm(case: Case, p: float) -> float:
    """The norm of every element that some rank has a gradient of, each counted once."""
    return vector_norm(
        np.concatenate([np.abs(_elements(case, index)) for index in range(len(case.tensors))]), p
    )


def _elements(case: Case, index: int) -> Array:
    """The elements of a gradient after reducing Partial terms; copies are the same values, and the last one stays."""
    tensor, sizes = case.tensors[index], case.sizes()
    reduce_ops = [p.reduce_op for p in tensor.placements if isinstance(p, Partial)]
    reduce_op = reduce_ops[0] if reduce_ops else None
    whole = np.full(tensor.shape, _IDENTITY.get(reduce_op or "", 0.0))
    there = np.zeros(tensor.shape, dtype=bool)
    seen = set()
    for rank in range(case.world_size):
        if not case.holds(tensor, rank) or rank in tensor.missing_on:
            continue
        held = local_indices(case, tensor, rank)
        where = np.ix_(*held) if held else ()
        terms = local_gradient(case, index, rank).astype(np.float64)
        here = case.coordinate(rank)
        term = tuple(
            here[name]
            for name, p in zip(tensor.mesh_dims, tensor.placements, strict=True)
            if not isinstance(p, Replicate)
        )
        if reduce_op is not None and term not in seen:
            terms = _REDUCED[reduce_op](whole[where], terms)
        elif reduce_op is not None:
            terms = whole[where]
        seen.add(term)
        whole[where] = terms
        there[where] = True
    partial_dims = [
        name for name, p in zip(tensor.mesh_dims, tensor.placements, strict=True) if isinstance(p, Partial)
    ]
    ranks = math.prod(sizes[name] for name in partial_dims)
    values: Array = (whole / ranks if reduce_op == "avg" else whole)[there]
    return values


def vector_norm(values: Array, p: float) -> float:
    """The p-norm of absolute values, by its definition, scaled so that powers do not leave the range."""
    if math.isinf(p):
        return float(values.max(initial=0.0) if p > 0 else values.min(initial=math.inf))
    if p == 0:
        return float(np.count_nonzero(values))
    largest = float(values.max(initial=0.0))
    return largest * float(math.fsum((values / largest) ** p) ** (1 / p)) if largest else 0.0


def clipped(gradient: Array, norm: float, max_norm: float) -> Array:
    """The gradient after clipping, unrounded."""
    return gradient.astype(np.float64) * min(1.0, max_norm / (norm + 1e-6))


@lru_cache(maxsize=16)
def rounding(case: Case) -> float:
    """How far float32 sums of Partial terms may be off, which cancel in some elements: the smallest shows it."""
    largest = [
        sum(
            float(np.abs(gradient_terms(case, index, rank)).max(initial=0.0))
            for rank in range(case.world_size)
        )
        for index, tensor in enumerate(case.tensors)
        if any(isinstance(placement, Partial) for placement in tensor.placements)
    ]
    return EPSILON["float32"] * max(largest, default=0.0)


def tolerance(expected: Array, dtype: str, relative: float = 1e-6) -> Array:
    """How far a value of ``dtype`` may be from ``expected``: ``relative``, or one unit in the last place."""
    return np.maximum(np.abs(expected) * max(relative, EPSILON[dtype]), _SMALLEST[dtype])

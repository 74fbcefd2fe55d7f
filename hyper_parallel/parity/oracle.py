"""What is right: NumPy float64 on unsharded gradients, independent of the rest of the library.

Sharding is repeated here from its definition (chunks of ceil(size / n), cut from left to right) with index
arrays, not taken from ``core.layout``, so that an error there cannot hide itself.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hyper_parallel.core.placement import Shard, StridedShard
from hyper_parallel.parity.cases import Case, Tensor

Array: TypeAlias = NDArray[Any]

# Distance between 1 and the next number: the relative size of one unit in the last place.
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


def global_gradients(case: Case) -> list[Array]:
    """The unsharded gradients as float32 arrays whose values each tensor's dtype holds exactly; every other case has zeros."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    zeros = rng.choice([0.0, 0.1])
    gradients = []
    for tensor in case.tensors:
        values = rng.standard_normal(tensor.shape) * (rng.random(tensor.shape) >= zeros) * tensor.scale
        gradients.append(rounded(np.asarray(values), tensor.dtype).astype(np.float32))
    return gradients


def rounded(values: Array, dtype: str) -> Array:
    """float64 ``values`` rounded to the nearest of ``dtype``, ties to even."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float64)
    bits: Array = np.atleast_1d(values.astype(np.float32)).view(np.uint32).astype(np.int64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64).reshape(values.shape)


def local_indices(case: Case, tensor: Tensor, rank: int) -> tuple[Array, ...]:
    """Per dimension of the tensor, the global indices that ``rank`` holds, for ``np.ix_``."""
    coordinate = dict(zip(case.mesh_dim_names, np.unravel_index(rank, case.mesh_shape), strict=True))
    sizes = dict(zip(case.mesh_dim_names, case.mesh_shape, strict=True))
    held = [np.arange(size) for size in tensor.shape]
    for name, placement in zip(tensor.mesh_dims, tensor.placements, strict=True):
        if isinstance(placement, Shard | StridedShard):
            pieces = placement.split_factor if isinstance(placement, StridedShard) else 1
            blocks = [
                _chunk(block, sizes[name], int(coordinate[name]))
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
    parts = []
    for tensor, gradient in zip(case.tensors, global_gradients(case), strict=True):
        there = np.zeros(tensor.shape, dtype=bool)
        for rank in set(range(case.world_size)) - tensor.missing_on:
            indices = local_indices(case, tensor, rank)
            there[np.ix_(*indices) if indices else ()] = True
        parts.append(np.abs(gradient[there].astype(np.float64)))
    return vector_norm(np.concatenate(parts), p)


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


def tolerance(expected: Array, dtype: str, relative: float = 1e-6) -> Array:
    """How far a value of ``dtype`` may be from ``expected``: ``relative``, or one unit in the last place."""
    return np.maximum(np.abs(expected) * max(relative, EPSILON[dtype]), _SMALLEST[dtype])

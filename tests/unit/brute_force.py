"""Sharding and norms written a second time, with index arrays and bitmaps: slow, plain, and sharing no code.

A placement is read by its class name and fields only, so that nothing of the library's arithmetic is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray


def cut(indices: Array, number: int) -> list[Array]:
    """Cut into ``number`` pieces of ceil(size / number), the last ones short or empty."""
    size = math.ceil(len(indices) / number)
    pieces = []
    for _ in range(number):
        pieces.append(indices[:size])
        indices = indices[size:]
    return pieces


def held_indices(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any], coordinate: Sequence[int]
) -> list[Array]:
    """Per tensor dim, the global indices found at ``coordinate``, in the order of the local tensor."""
    held = [np.arange(size) for size in shape]
    for mesh_dim, placement in enumerate(placements):
        kind = type(placement).__name__
        if kind not in ("Shard", "StridedShard"):
            continue
        strips = [held[placement.dim]]
        if kind == "StridedShard":
            strips = cut(held[placement.dim], placement.split_factor)
        mine = [cut(strip, mesh_shape[mesh_dim])[coordinate[mesh_dim]] for strip in strips]
        held[placement.dim] = np.concatenate(mine)
    return held


def coordinate_in(mesh_shape: Sequence[int], ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """Where ``rank`` stands in the array of ``ranks``."""
    found = np.argwhere(np.array(ranks).reshape(tuple(mesh_shape)) == rank)
    assert len(found) == 1
    return tuple(int(position) for position in found[0])


def held_grid(layout: Any, rank: int) -> tuple[Array, ...]:
    """What to index a global array with to get the local tensor of ``rank``."""
    mesh = layout.mesh
    here = coordinate_in(mesh.shape, mesh.ranks, rank)
    held = held_indices(layout.global_shape, mesh.shape, layout.placements, here)
    return np.ix_(*held) if held else ()


def local_part(whole: Array, layout: Any, rank: int) -> Array:
    """A copy of what ``rank`` holds of ``whole``; without a layout all of it."""
    return np.array(whole if layout is None else whole[held_grid(layout, rank)])


def norm_of(values: Sequence[Array], p: float) -> float:
    """The p-norm of all values together, in float64."""
    flat = np.concatenate([np.zeros(0), *(np.asarray(value, np.float64).reshape(-1) for value in values)])
    magnitudes = np.abs(flat)
    if p == 0:
        return float(np.count_nonzero(flat))
    if math.isinf(p):
        if not flat.size:
            return math.inf if p < 0 else 0.0
        return float(magnitudes.max() if p > 0 else magnitudes.min())
    with np.errstate(all="ignore"):
        largest = float(magnitudes.max()) if flat.size else 0.0
        if p < 0 or largest == 0 or not math.isfinite(largest):
            return float(np.sum(magnitudes**p) ** (1 / p))
        return largest * float(np.sum((magnitudes / largest) ** p) ** (1 / p))

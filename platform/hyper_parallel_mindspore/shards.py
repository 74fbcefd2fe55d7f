"""Cutting a global tensor into the parts of a layout, and putting it together again."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, mint
from numpy.typing import NDArray

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Partial, Replicate
from hyper_parallel_mindspore.process_groups import group_name, rank

_IDENTITIES = {"sum": 0.0, "avg": 0.0, "max": -np.inf, "min": np.inf}
# Older NPUs reduce no int16, and the newest int64 within a node only (CANN, HcclAllReduce): what does not carry
# from one byte or word to the next can be added in smaller ones.
_REDUCED_AS: dict[str, type[np.signedinteger[Any]]] = {"i2": np.int8, "i8": np.int32}


def cut(tensor: Tensor, layout: Layout) -> Tensor:
    """A copy of this rank's part; empty on a rank outside the mesh.

    Raises:
        ValueError: a placement is Partial, which does not say what the terms are.
    """
    if layout.partial_dims:
        raise ValueError(
            f"distribute_tensor: cannot tell the terms of {layout.placements}; use DTensor.from_local"
        )
    array = tensor.asnumpy()
    indices = _indices(layout)
    if indices is not None:
        return Tensor(array[indices])
    inside = layout.mesh.coordinate(rank()) is not None
    return Tensor(np.empty(layout.local_shape(rank()) if inside else (0,), array.dtype))


def assembled(local: Tensor, layout: Layout) -> Tensor:
    """The global tensor, from one all-reduce in which every rank adds its part to zeros.

    The parts travel as integers, whose sums with zeros keep all bits of any dtype; terms of a sum (``Partial``)
    are reduced in float32.

    Raises:
        ValueError: this rank is not in the mesh, or several kinds of ``Partial`` are mixed.
    """
    here = layout.mesh.coordinate(rank())
    if here is None:
        raise ValueError(f"full_tensor: rank {rank()} is not in the mesh of ranks {layout.mesh.ranks}")
    reduce_ops = {placement.reduce_op for placement in layout.placements if isinstance(placement, Partial)}
    if len(reduce_ops) > 1:
        raise ValueError(f"full_tensor: cannot reduce {layout.placements} in one step")
    array = local.asnumpy()
    reduce_op = reduce_ops.pop() if reduce_ops else None
    if reduce_op is None:
        parts = np.ascontiguousarray(array).view(f"i{array.itemsize}").reshape(array.shape)
    else:
        parts = array.astype(np.float32)
    total = np.full(layout.global_shape, _IDENTITIES[reduce_op or "sum"], parts.dtype)
    first_copy = all(here[d] == 0 for d, p in enumerate(layout.placements) if isinstance(p, Replicate))
    if first_copy and (indices := _indices(layout)) is not None:
        total[indices] = parts
    total = _all_reduced(total, "sum" if reduce_op in (None, "avg") else str(reduce_op), layout)
    if reduce_op is None:
        return Tensor(total.view(array.dtype))
    if reduce_op == "avg":
        total /= np.prod([layout.mesh.shape[d] for d in layout.partial_dims])
    return Tensor(total).astype(local.dtype)


def _all_reduced(array: NDArray[Any], reduce_op: str, layout: Layout) -> NDArray[Any]:
    if layout.mesh.size == 1 or not array.size:
        return array
    flat = array.reshape(-1)
    tensor = Tensor(flat.view(_REDUCED_AS.get(flat.dtype.str[1:], flat.dtype)))
    mint.distributed.all_reduce(tensor, reduce_op, group_name(tuple(sorted(layout.mesh.ranks))))
    return np.asarray(tensor.asnumpy()).view(array.dtype).reshape(array.shape)


def _indices(layout: Layout) -> tuple[NDArray[np.int64], ...] | None:
    """What selects this rank's part of the global array; None if it holds nothing."""
    if layout.mesh.coordinate(rank()) is None:
        return None
    areas = layout.areas(rank())
    if not areas:
        return None
    runs = [
        dict.fromkeys((area.offsets[dim], area.sizes[dim]) for area in areas)
        for dim in range(len(layout.global_shape))
    ]
    return np.ix_(*(np.concatenate([np.arange(start, start + size) for start, size in dim]) for dim in runs))

"""Statistics on an accelerator, without waiting for it.

Where there is float64, 1- and 2-norms of whole tensors are taken by the foreach kernels and combined in float64. Where
there is none (NPUs), the order in which a kernel sums is not documented, so powers are added up over blocks of 128
elements, and these sums in blocks again, until one is left: no sum is longer than a block, whatever its order. So are the
powers of other orders everywhere, in the widest float, as they and their roots may leave float32. Small tensors are put
together first: their copy costs less than a kernel for each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hyper_parallel.core.norm import NormKind
from hyper_parallel_torch.devices import has_foreach, plain, widest_float

_BLOCK = 128
_SMALL = 2**14
# What a kernel is given at once: to accumulate a narrow dtype in float32, torch_npu may copy it (its `_foreach_norm`
# copies the whole list: op-plugin, ForeachNormKernelOpApi.cpp).
_CHUNK = 2**22


def device_statistic(tensors: Sequence[Tensor], kind: NormKind, foreach: bool) -> Tensor:
    """The statistic of tensors on one device, none of them empty, as a 0-d tensor of its widest float."""
    device = tensors[0].device
    dtype = widest_float(device)
    if math.isinf(kind.p):
        ends = torch.stack([extremum(plain(tensor), kind).to(dtype) for tensor in tensors])
        return ends.amax() if kind.p > 0 else ends.amin()
    if kind.p == 0:
        return torch.stack([torch.count_nonzero(plain(tensor)) for tensor in tensors]).sum().to(dtype)
    if dtype == torch.float64 and kind.p in (1, 2):
        values = torch.stack(_norms(tensors, kind.p, foreach)).to(dtype)
        return torch.dot(values, values) if kind.p == 2 else values.sum()
    sums = _block_sums(tensors, kind.p, foreach).to(dtype)
    while sums.numel() > 1:
        sums = _block_sums([sums], 1, foreach)
    return sums[0]


def extremum(tensor: Tensor, kind: NormKind) -> Tensor:
    """The largest or smallest absolute value; NaN survives all of these operations."""
    if kind.p < 0 or tensor.is_complex():
        magnitude = tensor.abs()
        return magnitude.amax() if kind.p > 0 else magnitude.amin()
    low, high = torch.aminmax(tensor)
    return torch.maximum(low.abs(), high.abs())


def _block_sums(tensors: Sequence[Tensor], p: float, together: bool) -> Tensor:
    """Sums of the p-th powers over at most ``_BLOCK`` elements each, of all elements, as a 1-d tensor."""
    return torch.cat([sums for piece in _pieces(tensors, together) for sums in _sums(piece, p)])


def _sums(piece: Tensor, p: float) -> Iterator[Tensor]:
    if p not in (1, 2):  # the kernel would take a root, by an exponent rounded to float32
        piece, p = piece.abs().to(widest_float(piece.device)) ** p, 1
    dtype = _accumulator(piece.dtype)
    whole = piece.numel() // _BLOCK * _BLOCK
    for blocks in (piece[:whole].view(-1, _BLOCK), piece[whole:].view(1, -1)):
        if blocks.numel():
            norms = torch.linalg.vector_norm(blocks, p, dim=1, dtype=dtype)
            yield norms * norms if p == 2 else norms


def _pieces(tensors: Sequence[Tensor], together: bool) -> Iterator[Tensor]:
    """1-d tensors of up to ``_CHUNK`` elements with the same elements; of small tensors those of one dtype in one."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        flat = plain(tensor).reshape(-1)
        if together and flat.numel() <= _SMALL:
            small.setdefault(flat.dtype, []).append(flat)
        else:
            yield from torch.split(flat, _CHUNK)
    for members in small.values():
        for start in range(0, len(members), _CHUNK // _SMALL):
            yield torch.cat(members[start : start + _CHUNK // _SMALL])


def _norms(tensors: Sequence[Tensor], p: float, foreach: bool) -> list[Tensor]:
    """The norm of each tensor, in float32 or wider and in any order.

    A call of the foreach kernel takes tensors of one dtype: given several, torch takes a loop instead.
    """
    if not (foreach and has_foreach(tensors[0].device)):
        return [torch.linalg.vector_norm(t, p, dtype=_accumulator(t.dtype)) for t in tensors]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [
        norm
        for dtype, members in by_dtype.items()
        for norm in torch._foreach_norm(members, p, dtype=_accumulator(dtype))
    ]


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)

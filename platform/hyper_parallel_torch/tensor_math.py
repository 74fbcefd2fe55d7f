"""Statistics, scaling and small scalar arithmetic on local tensors.

On the CPU a norm is taken over blocks of 128 elements in float32 and combined in float64: torch's own sum over a
whole tensor drifts (by 1e-3 at 2e7 elements), blocks cost the same and do not. Their length bounds the error: the
sum runs in 8 lanes, and beside one large square a lane may lose up to half a unit in the last place (2**-24) with
each of its other 15, so 5e-7 of the norm; with 4,096 elements that is 1.5e-5. Small tensors are put together first,
which is faster than a norm of each. Where squares would leave the range of float32, the host sees it in the result
and the tensors are read once more in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyper_parallel.core.norm import NormKind
from hyper_parallel_torch.device_norms import device_statistic, extremum
from hyper_parallel_torch.devices import (
    by_format,
    check_foreach,
    filled,
    has_foreach,
    moved,
    numbers,
    plain,
    unrounded,
    widest_float,
)
from hyper_parallel_torch.layouts import ProcessGroups
from hyper_parallel_torch.paging import paged
from hyper_parallel_torch.runs import readable, slabs, writable

_BLOCK = 128
_CHUNK = 2**20
_STEP = 648055  # the golden ratio of _CHUNK, so that neighbours get far apart
# Smaller tensors are put together; the copy costs less than calls for each.
_SMALL = 2**14
# Below this mean, powers of single elements may be subnormal in float32 and lose their digits.
_SMALLEST_MEAN = 1e-30


class TorchMath:
    """The ``TensorMath`` role of the platform."""

    process_groups: ProcessGroups

    @torch.no_grad()
    def statistic(self, tensors: Sequence[Tensor], kind: NormKind, foreach: bool | None) -> Tensor:
        found = [
            _statistic(members, kind, foreach).to(self._scalar_dtype(device))
            for device, members in _by_device(tensors).items()
        ]
        if len(found) == 1:
            return found[0]
        # On an accelerator, if there is one: the host would have to wait for it.
        target = next((scalar.device for scalar in found if scalar.device.type != "cpu"), found[0].device)
        values = torch.stack([moved(scalar, target) for scalar in found])
        if kind.reduce_op == "sum":
            return torch.sum(values)
        return torch.amax(values) if kind.p > 0 else torch.amin(values)

    def pack(self, values: Sequence[Tensor | float], like: Tensor | None) -> Tensor:
        device = torch.device("cpu") if like is None else like.device
        known = [0.0 if isinstance(value, Tensor) else value for value in values]
        buffer = numbers(known, self._scalar_dtype(device), device)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                buffer[index] = moved(value, device)
        return buffer

    def _scalar_dtype(self, device: torch.device) -> torch.dtype:
        """That of statistics. Those of the host meet those of the devices that the job uses, and must not widen them."""
        return widest_float(device, self.process_groups.device_types())

    def read(self, buffer: Tensor, wait: bool) -> list[float] | None:
        return buffer.reshape(-1).tolist() if wait or buffer.device.type == "cpu" else None

    def where(self, condition: Tensor, true: Tensor | float, false: Tensor | float) -> Tensor:
        true, false = (moved(v, condition.device) if isinstance(v, Tensor) else v for v in (true, false))
        return torch.where(condition, true, false)

    def cast(self, scalar: Tensor | float, dtype: torch.dtype | None, like: Tensor | None) -> Tensor:
        found = scalar.full_tensor() if isinstance(scalar, DTensor) else scalar
        dtype, device = dtype or torch.float32, None if like is None else like.device
        if not isinstance(found, Tensor):
            return filled(found, dtype, device)
        return (found if device is None else moved(found, device)).to(dtype)

    def promoted_dtype(self, tensors: Sequence[Tensor]) -> torch.dtype:
        return reduce(torch.promote_types, dict.fromkeys(tensor.dtype for tensor in tensors)).to_real()

    @torch.no_grad()
    def scale_(self, tensors: Sequence[Tensor], coefficient: Tensor, foreach: bool | None) -> None:
        for device in {tensor.device for tensor in tensors}:
            check_foreach(device, foreach)
        for device, members in _by_device(writable(tensors, merge=foreach is not False)).items():
            factor = moved(coefficient, device)
            together, alone = by_format(members)
            if foreach is False or not has_foreach(device):
                together, alone = [], members
            elif device.type != "cpu":  # for 16 bits times 32 the kernels are loops anyway
                alone += [tensor for tensor in together if tensor.itemsize == 2]
                together = [tensor for tensor in together if tensor.itemsize != 2]
            if together:
                torch._foreach_mul_(together, factor)
            for tensor in alone:
                tensor.mul_(unrounded(factor, tensor))

    @torch.no_grad()
    def scaled(self, gradients: Sequence[Tensor], coefficient: Tensor) -> list[Tensor]:
        members = [_local(gradient) for gradient in gradients]
        factors = {device: moved(coefficient, device) for device in {local.device for local in members}}
        # A product of two 0-d tensors has the wider dtype of the two.
        products = ((t * unrounded(factors[t.device], t)).to(t.dtype) for t in members)
        return [_like(gradient, product) for gradient, product in zip(gradients, products, strict=True)]

    @torch.no_grad()
    def flatten(
        self, pieces: Sequence[tuple[Tensor | None, int, int]], numel: int, fill: float, like: Tensor | None
    ) -> Tensor:
        present = next((tensor for tensor, _, _ in pieces if tensor is not None), like)
        device = None if present is None else present.device
        buffer = paged(numel, torch.float32, device).fill_(fill)
        position = 0
        for tensor, start, stop in pieces:
            if tensor is not None:
                end = position
                for slab in slabs(plain(tensor), start, stop):
                    end += slab.numel()
                    buffer[end - slab.numel() : end].view(slab.shape).copy_(slab)
            position += stop - start
        return buffer

    @torch.no_grad()
    def clamp_(self, tensors: Sequence[Tensor], bound: float, foreach: bool | None) -> None:
        for tensor in tensors:
            check_foreach(tensor.device, foreach)
        for tensor in writable(tensors, merge=True):
            tensor.clamp_(-bound, bound)

    @torch.no_grad()
    def checksum(self, tensor: Tensor) -> Tensor:
        total = filled(0.0, widest_float(tensor.device), tensor.device)
        ordered = plain(tensor)
        for chunk in _chunks([torch.view_as_real(ordered) if ordered.is_complex() else ordered]):
            # Multiples of an odd number modulo a power of two: exact in float32, no weight is 0, and none comes twice.
            steps = torch.arange(chunk.numel(), device=chunk.device) * _STEP % _CHUNK
            weights = steps.to(total.dtype) / _CHUNK + 0.5
            total = total * 1.5 + (chunk.to(total.dtype) * weights).sum()
        return total

    def check_in_place(self, tensors: Sequence[Tensor]) -> None:
        writable(tensors, merge=False)

    def nonfinite_count(self, tensor: Tensor) -> int:
        return tensor.numel() - int(torch.isfinite(tensor).sum())


def _by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found


def _statistic(tensors: Sequence[Tensor], kind: NormKind, foreach: bool | None) -> Tensor:
    """The statistic of tensors on one device."""
    device = tensors[0].device
    check_foreach(device, foreach)
    found = [tensor for tensor in readable(tensors, merge=foreach is not False) if tensor.numel()]
    if not found:
        return filled(kind.identity, widest_float(device), device)
    if device.type != "cpu":
        return device_statistic(found, kind, foreach is not False)
    total = _square_sum(found) if kind.p == 2 else math.nan
    if kind.p != 2 or not _in_range(total, found):
        total = _on_host(found, kind)
    return torch.tensor(total, dtype=torch.float64, device=device)


def _on_host(tensors: Sequence[Tensor], kind: NormKind) -> float:
    """The statistic, powers in float64: their error grows by 1/p in the norm, and float32 is off by 2e-6 at p = 1."""
    if math.isinf(kind.p):
        # Floats, since small tensors that live on between large ones would keep the heap from being reused.
        ends = [float(extremum(chunk, kind)) for chunk in _chunks(tensors)]
        return math.nan if any(map(math.isnan, ends)) else max(ends) if kind.p > 0 else min(ends)
    if kind.p == 0:
        return float(sum(int(torch.count_nonzero(chunk)) for chunk in _chunks(tensors)))
    norms = (torch.linalg.vector_norm(chunk, kind.p) for chunk in _chunks(tensors, torch.float64))
    return sum(float(norm**kind.p) for norm in norms)


def _square_sum(tensors: Sequence[Tensor]) -> float:
    """The sum of squares on the CPU, from norms over blocks."""
    total = 0.0
    for chunk in _chunks(tensors, torch.float32):
        whole = chunk.numel() // _BLOCK * _BLOCK
        norms = [torch.linalg.vector_norm(chunk[:whole].view(-1, _BLOCK), 2, dim=1)] if whole else []
        if whole < chunk.numel():
            norms.append(torch.linalg.vector_norm(chunk[whole:], 2).reshape(1))
        values = (norms[0] if len(norms) == 1 else torch.cat(norms)).to(torch.float64)
        total += float(torch.dot(values, values))
    return total


def _chunks(tensors: Iterable[Tensor], least: torch.dtype | None = None) -> Iterator[Tensor]:
    """1-d pieces of bounded size, in a dtype at least as wide as ``least``; small tensors are put together.

    What has to be copied goes to the same memory each time, so a piece is to be used before the next one is taken.
    """
    scratch = torch.empty(0)
    for pieces in _portions(tensors):
        found = pieces[0] if len(pieces) == 1 else torch._C._nn.flatten_dense_tensors(pieces)
        dtype = found.dtype if least is None else torch.promote_types(found.dtype, least)
        if found.dtype != dtype or not found.is_contiguous():
            if scratch.dtype != dtype or scratch.numel() < found.numel():
                scratch = paged(found.numel(), dtype, found.device)
            found = scratch[: found.numel()].view(found.shape).copy_(found)
        yield found.view(-1)


def _portions(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Views of up to ``_CHUNK`` elements of one tensor, or so many of several small ones of one dtype."""
    small: dict[torch.dtype, list[Tensor]] = {}
    room: dict[torch.dtype, int] = {}
    for tensor in tensors:
        numel, dtype = tensor.numel(), tensor.dtype
        if numel > _SMALL:
            for start in range(0, numel, _CHUNK):
                yield list(slabs(tensor, start, min(start + _CHUNK, numel)))
            continue
        if room.get(dtype, -1) < numel:
            if dtype in small:
                yield small[dtype]
            small[dtype], room[dtype] = [], _CHUNK
        small[dtype].append(tensor)
        room[dtype] -= numel
    yield from small.values()


def _in_range(total: float, tensors: Sequence[Tensor]) -> bool:
    """Whether no power overflowed or got lost in subnormals; a NaN stays one, however it is computed."""
    return math.isnan(total) or _SMALLEST_MEAN * sum(tensor.numel() for tensor in tensors) < total < math.inf


def _local(gradient: Tensor) -> Tensor:
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _like(gradient: Tensor, local: Tensor) -> Tensor:
    if not isinstance(gradient, DTensor):
        return local
    return DTensor.from_local(
        local,
        gradient.device_mesh,
        gradient.placements,
        run_check=False,
        shape=gradient.shape,
        stride=gradient.stride(),
    )

"""Statistics, scaling and small scalar arithmetic on local tensors.

On the CPU a norm is taken over blocks of 4,096 elements in float32 and combined in float64: torch's own sum over a
whole tensor drifts (by 1e-3 at 2e7 elements), blocks cost the same and do not. Where squares would leave the range
of float32, the host sees it in the result and the tensors are read once more in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hyper_parallel.core.norm import NormKind
from hyper_parallel_torch.runs import flattened, merged

_BLOCK = 4096
_CHUNK = _BLOCK * 256
# Other powers are taken in float64 on the CPU: an error in them grows by 1/p in the norm, and for p = 1 a block is
# off by 2e-6.
_FAST = (2.0,)
_FLOAT64_DEVICES = ("cpu", "cuda", "xpu")
# Below this mean, powers of single elements may be subnormal in float32 and lose their digits.
_SMALLEST_MEAN = 1e-30


class TorchMath:
    """The ``TensorMath`` role of the platform."""

    @torch.no_grad()
    def statistic(self, tensors: Sequence[Tensor], kind: NormKind, foreach: bool | None) -> Tensor:
        device = tensors[0].device
        _check_foreach(device, foreach)
        flats = [flat for flat in flattened(tensors, merge=foreach is not False) if flat.numel()]
        if not flats:
            return torch.tensor(kind.identity, dtype=_wide(device), device=device)
        if math.isinf(kind.p):
            return _extremum(flats, kind, device)
        if kind.p == 0:
            return _sum([torch.count_nonzero(flat) for flat in flats], device)
        if device.type != "cpu":
            return _power_sum(flats, kind.p, device)
        if kind.p in _FAST:
            total = _power_sum(flats, kind.p, device)
            if _in_range(float(total), flats):
                return total
        norms = [torch.linalg.vector_norm(chunk, kind.p, dtype=torch.float64) for chunk in _chunks(flats)]
        return _sum([norm**kind.p for norm in norms], device)

    def pack(self, values: Sequence[Tensor | float], like: Tensor | None) -> Tensor:
        device = torch.device("cpu") if like is None else like.device
        numbers = [0.0 if isinstance(value, Tensor) else value for value in values]
        buffer = torch.tensor(numbers, dtype=_wide(device)).to(device, non_blocking=True)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                buffer[index] = value
        return buffer

    def read(self, buffer: Tensor, wait: bool) -> list[float] | None:
        return buffer.reshape(-1).tolist() if wait or buffer.device.type == "cpu" else None

    def where(self, condition: Tensor, true: Tensor | float, false: Tensor | float) -> Tensor:
        return torch.where(condition, true, false)

    def cast(self, scalar: Tensor | float, dtype: torch.dtype | None, like: Tensor | None) -> Tensor:
        tensor = scalar.full_tensor() if isinstance(scalar, DTensor) else torch.as_tensor(scalar)
        return tensor.to(device=None if like is None else like.device, dtype=dtype or torch.float32)

    def promoted_dtype(self, tensors: Sequence[Tensor]) -> torch.dtype:
        return reduce(torch.promote_types, dict.fromkeys(tensor.dtype for tensor in tensors))

    @torch.no_grad()
    def scale_(self, tensors: Sequence[Tensor], coefficient: Tensor, foreach: bool | None) -> None:
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in merged(tensors) if foreach is not False else {id(t): t for t in tensors}.values():
            by_device.setdefault(tensor.device, []).append(tensor)
        for device, members in by_device.items():
            factor = coefficient.to(device)
            if foreach is not False and _has_foreach(device):
                torch._foreach_mul_(members, factor)
            else:
                for tensor in members:
                    tensor.mul_(factor)

    @torch.no_grad()
    def scaled(self, gradients: Sequence[Tensor], coefficient: Tensor) -> list[Tensor]:
        # A product of two 0-d tensors has the wider dtype of the two.
        products = ((_local(g) * coefficient.to(g.device)).to(g.dtype) for g in gradients)
        return [_like(gradient, product) for gradient, product in zip(gradients, products, strict=True)]

    @torch.no_grad()
    def flatten(
        self, pieces: Sequence[tuple[Tensor | None, int, int]], numel: int, fill: float, like: Tensor | None
    ) -> Tensor:
        present = next((tensor for tensor, _, _ in pieces if tensor is not None), like)
        device = None if present is None else present.device
        buffer = torch.full((numel,), fill, dtype=torch.float32, device=device)
        position = 0
        for tensor, start, stop in pieces:
            if tensor is not None:
                buffer[position : position + stop - start].copy_(tensor.reshape(-1)[start:stop])
            position += stop - start
        return buffer

    @torch.no_grad()
    def clamp_(self, tensors: Sequence[Tensor], bound: float, foreach: bool | None) -> None:
        for tensor in tensors:
            _check_foreach(tensor.device, foreach)
        for tensor in merged(tensors):
            tensor.clamp_(-bound, bound)

    @torch.no_grad()
    def checksum(self, tensor: Tensor) -> Tensor:
        total = torch.zeros((), dtype=_wide(tensor.device), device=tensor.device)
        for chunk in _chunks([tensor.reshape(-1)]):
            # Multiples of an irrational number: no weight is 0, and none comes twice.
            weights = (
                torch.arange(chunk.numel(), device=chunk.device).to(total.dtype) * 0.6180339887498949 % 1
                + 0.5
            )
            total = total * 1.5 + (chunk.to(total.dtype) * weights).sum()
        return total

    def nonfinite_count(self, tensor: Tensor) -> int:
        return tensor.numel() - int(torch.isfinite(tensor).sum())


def _power_sum(flats: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """The sum of abs(x)**p, from norms over blocks."""
    norms: list[Tensor] = []
    small: list[Tensor] = []
    for chunk in _chunks(flats) if device.type == "cpu" else flats:
        whole = chunk.numel() // _BLOCK * _BLOCK if device.type == "cpu" else 0
        if whole:
            norms.append(
                torch.linalg.vector_norm(chunk[:whole].view(-1, _BLOCK), p, dim=1, dtype=_accumulator(chunk))
            )
        if whole < chunk.numel():
            small.append(chunk[whole:] if whole else chunk)
    wide = _wide(device)
    if small and _has_foreach(device):
        dtype = reduce(torch.promote_types, map(_accumulator, small))
        norms.append(torch.stack(torch._foreach_norm(small, p, dtype=dtype)))
    elif small:
        norms.extend(torch.linalg.vector_norm(flat, p, dtype=_accumulator(flat)).reshape(1) for flat in small)
    values = torch.cat([norm.to(wide) for norm in norms])
    return torch.dot(values, values) if p == 2 else (values**p).sum()


def _extremum(flats: Sequence[Tensor], kind: NormKind, device: torch.device) -> Tensor:
    """The largest or smallest absolute value; NaN survives all of these operations."""
    if kind.p > 0:
        ends = [end for flat in flats for end in torch.aminmax(flat.abs() if flat.is_complex() else flat)]
        return torch.stack([end.abs().to(_wide(device)) for end in ends]).amax()
    return torch.stack([chunk.abs().amin().to(_wide(device)) for chunk in _chunks(flats)]).amin()


def _sum(scalars: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack([scalar.to(_wide(device)) for scalar in scalars]).sum()


def _chunks(flats: Sequence[Tensor]) -> Iterator[Tensor]:
    """Pieces of bounded size, so that no operation copies a whole gradient."""
    for flat in flats:
        yield from torch.split(flat, _CHUNK) if flat.numel() > _CHUNK else (flat,)


def _in_range(total: float, flats: Sequence[Tensor]) -> bool:
    """Whether no power overflowed or got lost in subnormals; a NaN stays one, however it is computed."""
    return math.isnan(total) or _SMALLEST_MEAN * sum(flat.numel() for flat in flats) < total < math.inf


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float64 if device.type in _FLOAT64_DEVICES else torch.float32


def _has_foreach(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda", "xpu", torch._C._get_privateuse1_backend_name())


def _check_foreach(device: torch.device, foreach: bool | None) -> None:
    if foreach and not _has_foreach(device):
        raise RuntimeError(f"foreach=True was passed, but {device.type} tensors have no foreach kernels")


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

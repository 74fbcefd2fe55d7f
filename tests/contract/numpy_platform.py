"""A third party's platform: NumPy arrays, and ranks that are threads of ``numpy_world``.

It is reached like any other, through an entry point: ``numpy = tests.contract.numpy_platform:NumpyPlatform``.
It shares memory wherever a framework may: reductions are in place and spoil what they leave of a buffer, and an
element of a buffer is a view of it, so that a scalar changes with its buffer. MAX and MIN drop NaN, as gloo's and
NCCL's do.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.norm import NormKind
from hyper_parallel.core.placement import Placement
from hyper_parallel.interface import LAYOUT_ATTRIBUTE, Description
from hyper_parallel.sharded_tensor import even_global_shape
from tests.contract.numpy_world import Call, World, current_rank, current_world

_ALONE = World(1)


class Tensor(np.ndarray):
    """An array that takes attributes (its layout) and may hold a shard of a distributed tensor."""

    distributed = False


class Parameter:
    """What a framework's parameter has: values, gradients, and whatever attributes are set on it."""

    def __init__(
        self, data: Any, grad: Any = None, main_grad: Any = None, requires_grad: bool = True
    ) -> None:
        self.data = np.asarray(data).view(Tensor)
        self.grad: np.ndarray | None = grad
        self.main_grad: np.ndarray | None = main_grad
        self.requires_grad = requires_grad
        self.distributed = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


class Buffer(np.ndarray):
    """A 1-d array whose elements are views of it, as in torch."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and self.ndim == 1:
            return self[index : index + 1 or None].reshape(())
        return super().__getitem__(index)


class NumpyParameters:
    """The ``Parameters`` role; a mapping from names to parameters stands for a module."""

    def parameters(self, source: Any) -> tuple[list[Any], list[str]]:
        if isinstance(source, Mapping):
            return list(source.values()), list(source)
        if isinstance(source, Parameter | np.ndarray):
            return [source], []
        if not isinstance(source, Iterable):
            raise TypeError(f"expected NumPy parameters, got {type(source).__name__}: the platform is numpy")
        tensors = list(source)
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, Parameter | np.ndarray):
                kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
                raise TypeError(f"tensor {index} is a {kind}, but the platform is numpy")
        return tensors, []

    def gradients(
        self, parameters: Sequence[Any], gradients: Sequence[Any] | None
    ) -> tuple[list[Any], Sequence[Hashable]]:
        local = [_gradient(p) for p in parameters] if gradients is None else list(gradients)
        signature = [
            (getattr(parameter, "requires_grad", False), _layout(parameter, gradient), parameter.shape)
            for parameter, gradient in zip(parameters, local, strict=True)
        ]
        return local, signature

    def describe(self, parameter: Any, gradient: Any) -> Description:
        layout = _layout(parameter, gradient)
        held = _gradient(parameter) if gradient is None else gradient
        local_shape = tuple((parameter if held is None else held).shape)
        global_shape = local_shape if layout is None else layout.global_shape
        return Description(local_shape, global_shape, layout, getattr(parameter, "requires_grad", False))

    def carries_gradient(self, parameter: Any) -> bool:
        return getattr(parameter, "requires_grad", False) or _gradient(parameter) is not None


class NumpyCollectives:
    """The ``Collectives`` role, over the threads of the current world."""

    def rank(self) -> int:
        return current_rank()

    def groups(self) -> frozenset[tuple[int, ...]]:
        return frozenset(group for group in _world().groups if current_rank() in group)

    def all_reduce(self, buffer: np.ndarray, reduce_op: str, ranks: tuple[int, ...]) -> np.ndarray:
        combine = {"sum": np.add, "max": np.fmax}[reduce_op]
        call = Call(("all_reduce", reduce_op, buffer.shape), ranks)
        found = _world().meet(call, buffer.copy(), lambda buffers: combine.reduce(np.stack(buffers), axis=0))
        buffer[...] = found  # in place, as most libraries do it
        return buffer

    def reduce_scatter(self, buffer: np.ndarray, reduce_op: str, ranks: tuple[int, ...]) -> np.ndarray:
        combine = {"sum": np.add, "max": np.fmax, "min": np.fmin}[reduce_op]
        call = Call(("reduce_scatter", reduce_op, buffer.shape), ranks)
        found = _world().meet(call, buffer.copy(), lambda buffers: combine.reduce(np.stack(buffers), axis=0))
        size = len(buffer) // len(ranks)
        mine = slice(size * ranks.index(current_rank()), size * (ranks.index(current_rank()) + 1))
        buffer[...] = math.nan
        buffer[mine] = found[mine]
        return buffer[mine]

    def all_gather_object(self, value: Any, ranks: tuple[int, ...]) -> list[Any]:
        return _world().meet(Call(("all_gather_object",), ranks), value, list)


class NumpyMath:
    """The ``TensorMath`` role, in float64.

    With ``waits`` set this is a device whose values the host has to wait for.
    """

    waits = False

    def check_in_place(self, tensors: Sequence[np.ndarray]) -> None:
        for tensor in tensors:
            steps = zip(tensor.strides, tensor.shape, strict=True)
            if tensor.size and any(step == 0 and size > 1 for step, size in steps):
                raise ValueError(
                    f"a gradient of shape {tensor.shape} is expanded and cannot be scaled in place"
                )

    def statistic(self, tensors: Sequence[np.ndarray], kind: NormKind, foreach: bool | None) -> np.float64:
        if foreach:
            raise RuntimeError("foreach=True was passed, but NumPy has no foreach kernels")
        self.check_in_place(tensors)
        values = [np.abs(np.asarray(tensor, np.float64)).reshape(-1) for tensor in tensors]
        magnitudes = np.concatenate([np.zeros(0), *values])
        if not magnitudes.size:
            return np.float64(kind.identity)
        if math.isinf(kind.p):
            return magnitudes.max() if kind.p > 0 else magnitudes.min()
        with np.errstate(divide="ignore", over="ignore"):
            return np.float64(np.count_nonzero(magnitudes)) if kind.p == 0 else np.sum(magnitudes**kind.p)

    def pack(self, values: Sequence[Any], like: Any) -> np.ndarray:
        return np.array([float(value) for value in values]).view(Buffer)

    def read(self, buffer: np.ndarray, wait: bool) -> list[float] | None:
        return np.asarray(buffer, np.float64).reshape(-1).tolist() if wait or not self.waits else None

    def where(self, condition: Any, true: Any, false: Any) -> Any:
        return np.where(condition, true, false)[()]

    def cast(self, scalar: Any, dtype: Any, like: Any) -> Tensor:
        with np.errstate(over="ignore"):
            return np.asarray(scalar).astype(dtype or np.float32).view(Tensor)

    def promoted_dtype(self, tensors: Sequence[np.ndarray]) -> Any:
        return np.result_type(*(tensor.dtype for tensor in tensors))

    def scale_(self, tensors: Sequence[np.ndarray], coefficient: np.ndarray, foreach: bool | None) -> None:
        distinct = {(t.ctypes.data, t.shape, t.strides, t.dtype): t for t in tensors}
        for tensor, product in zip(
            distinct.values(), self.scaled([*distinct.values()], coefficient), strict=True
        ):
            tensor[...] = product

    def scaled(self, gradients: Sequence[np.ndarray], coefficient: np.ndarray) -> list[np.ndarray]:
        # In an array of one dimension, so that NumPy does not round the float32 to a float16 first.
        factor = np.asarray(coefficient, np.float32).reshape(1)
        with np.errstate(invalid="ignore"):
            products = [np.asarray(gradient).reshape(-1) * factor for gradient in gradients]
        return [
            product.astype(gradient.dtype).reshape(gradient.shape).view(type(gradient))
            for gradient, product in zip(gradients, products, strict=True)
        ]

    def flatten(
        self, pieces: Sequence[tuple[np.ndarray | None, int, int]], numel: int, fill: float, like: Any
    ) -> np.ndarray:
        buffer, position = np.full(numel, fill, np.float32).view(Buffer), 0
        for tensor, start, stop in pieces:
            if tensor is not None:
                buffer[position : position + stop - start] = np.asarray(tensor).reshape(-1)[start:stop]
            position += stop - start
        return buffer

    def clamp_(self, tensors: Sequence[np.ndarray], bound: float, foreach: bool | None) -> None:
        for tensor in tensors:
            np.clip(tensor, -bound, bound, out=tensor)

    def checksum(self, tensor: np.ndarray) -> np.float64:
        digest = hashlib.blake2b(np.ascontiguousarray(tensor).tobytes(), digest_size=6).digest()
        return np.float64(int.from_bytes(digest, "big"))

    def nonfinite_count(self, tensor: np.ndarray) -> int:
        return int(np.size(tensor) - np.isfinite(tensor).sum())


class NumpyConstruction:
    """The ``Construction`` role; a device mesh is a ``Mesh``."""

    def init_device_mesh(
        self, device_type: str, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...] | None
    ) -> Mesh:
        return Mesh(mesh_shape, tuple(range(_world().size)), mesh_dim_names)

    def distribute_tensor(self, tensor: Any, mesh: Mesh, placements: Sequence[Placement]) -> Parameter:
        layout = self.layout(mesh, placements, tuple(tensor.shape))
        data = getattr(tensor, "data", tensor) if isinstance(tensor, Parameter) else tensor
        blocks = [
            data[tuple(slice(o, o + s) for o, s in zip(area.offsets, area.sizes, strict=True))]
            for area in layout.areas(current_rank())
        ]
        local = np.concatenate([np.zeros(0, data.dtype), *(block.reshape(-1) for block in blocks)])
        return self._distributed(local.reshape(layout.local_shape(current_rank())), layout)

    def dtensor_from_local(
        self, local: np.ndarray, mesh: Mesh, placements: Sequence[Placement], shape: tuple[int, ...] | None
    ) -> Parameter:
        layout = self.layout(mesh, placements, tuple(local.shape))
        whole = even_global_shape(layout, local.shape) if shape is None else shape
        return self._distributed(local, self.layout(mesh, placements, whole))

    def is_dtensor(self, value: Any) -> bool:
        return getattr(value, "distributed", False)

    def layout(self, mesh: Mesh, placements: Sequence[Placement], global_shape: tuple[int, ...]) -> Layout:
        return Layout(mesh, tuple(placements), global_shape)

    def mesh(self, mesh: Mesh) -> Mesh:
        return mesh

    def _distributed(self, local: np.ndarray, layout: Layout) -> Parameter:
        parameter = Parameter(local)
        parameter.distributed = True
        setattr(parameter, LAYOUT_ATTRIBUTE, layout)
        return parameter


class NumpyConversion:
    """The ``Conversion`` role."""

    def from_numpy(self, array: Any, dtype: str, device_type: str) -> Tensor:
        return np.array(array, dtype).view(Tensor)

    def to_numpy(self, tensor: Any) -> np.ndarray:
        return np.array(tensor.data if isinstance(tensor, Parameter) else tensor, np.float64)

    def parameter(self, tensor: np.ndarray) -> Parameter:
        return Parameter(tensor)


class NumpyPlatform(NumpyParameters, NumpyCollectives, NumpyMath, NumpyConstruction, NumpyConversion):
    """All five roles."""

    name = "numpy"


def _world() -> World:
    return current_world() or _ALONE


def _gradient(parameter: Any) -> np.ndarray | None:
    if not getattr(parameter, "requires_grad", False):
        return None
    return parameter.grad if parameter.main_grad is None else parameter.main_grad


def _layout(parameter: Any, gradient: Any) -> Layout | None:
    layout = getattr(parameter, LAYOUT_ATTRIBUTE, None)
    return getattr(gradient, LAYOUT_ATTRIBUTE, None) if layout is None else layout

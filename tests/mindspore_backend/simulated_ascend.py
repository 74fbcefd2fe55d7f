"""MindSpore on the CPU, dressed up as Ascend: the platform for NPUs runs, and may do only what it could do there.

What an NPU refuses is refused, what works there and not on the CPU is done with NumPy, and every wait of the host is
counted. The rules, each with its source; what is said of HCCL holds for Atlas A2:

- HCCL reduces int8, int16, int32, int64, float16, bfloat16 and float32, by sum, prod, max or min; of these Atlas
  training products (the first 910) know neither bfloat16 nor int16. CANN, HcclAllReduce.
- ``Tensor.mul_`` writes in place, whatever the strides. MindSpore 2.10, docstring of ``Tensor.mul_``.
- ``Tensor.copy_`` writes to a tensor that may be on the host if shape and dtype are those of the source. Docstring of
  ``Tensor.copy_``.
- ``mint.distributed.reduce_scatter_tensor`` takes a first dim that the number of ranks divides. Its docstring.

Three are more than the documents say, as nothing there says otherwise: max and min drop NaN, alone and between ranks;
what has no elements is not reduced; float64 does not exist at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint
from mindspore.communication import get_process_group_ranks

from hyper_parallel.platforms import get_platform
from hyper_parallel.preparation import forget_layouts
from hyper_parallel_mindspore import ascend_math, block_sums, collectives, process_groups
from hyper_parallel_mindspore.host_memory import BFLOAT16, _Memory, in_order

ATLAS_A2 = frozenset({"Int8", "Int16", "Int32", "Int64", "Float16", "BFloat16", "Float32"})
ATLAS_910 = ATLAS_A2 - {"Int16", "BFloat16"}
_NUMPY = {"Float32": np.dtype(np.float32), "Float16": np.dtype(np.float16), "BFloat16": BFLOAT16}


@dataclass
class Seen:
    """What was asked for meanwhile: collectives as (name, dtype, op), and how often the host waited for the device."""

    dtypes: frozenset[str]
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    waits: int = 0


@contextmanager
def ascend(dtypes: frozenset[str] = ATLAS_A2) -> Iterator[Seen]:
    """While this lasts, MindSpore says that it is on Ascend, and ``get_platform`` gives the platform for it."""
    seen = Seen(dtypes)
    get_context, create_group = mindspore.get_context, process_groups.create_group
    all_reduce = mint.distributed.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            mindspore, "get_context", lambda key: "Ascend" if key == "device_target" else get_context(key)
        )
        # MCCL has no options
        patch.setattr(process_groups, "create_group", lambda name, ranks, _: create_group(name, ranks))
        for module in (ascend_math, block_sums):
            patch.setattr(module, "mint", Mint())
        patch.setattr(Tensor, "mul_", _mul)
        patch.setattr(Tensor, "copy_", _copy)
        for name in ("asnumpy", "item", "tolist", "__float__", "__int__", "__bool__"):
            patch.setattr(Tensor, name, _counted(getattr(Tensor, name), seen))
        for name, simulated in (("all_reduce", _all_reduce), ("reduce_scatter_tensor", _reduce_scatter)):
            patch.setattr(collectives.mint.distributed, name, simulated(all_reduce, seen))
        get_platform.cache_clear()
        forget_layouts()
        yield seen
    get_platform.cache_clear()
    forget_layouts()


class Mint:
    """``mindspore.mint`` without float64, and with max and min that drop NaN wherever it stands."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(mint, name)

        def called(*args: Any, **options: Any) -> Any:
            tensors = [
                t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, Tensor)
            ]
            if any(tensor.dtype == mindspore.float64 for tensor in tensors):
                raise TypeError(f"mint.{name}: float64 is not supported on this NPU")
            if name in ("max", "min"):
                worst = -math.inf if name == "max" else math.inf
                args = (mint.where(mint.isnan(args[0]), worst, args[0]), *args[1:])
            return function(*args, **options)

        return called


def _array(tensor: Tensor) -> np.ndarray:
    """The memory of a tensor with its shape and strides; NumPy writes where MindSpore's CPU kernels would not."""
    dtype = _NUMPY[str(tensor.dtype)]
    strides = tuple(stride * dtype.itemsize for stride in tensor.stride())
    return np.asarray(_Memory(tensor, tensor.data_ptr(), tuple(tensor.shape), dtype, strides))


def _mul(tensor: Tensor, other: Tensor) -> Tensor:
    assert tensor.dtype == other.dtype == mindspore.float32, "of other dtypes the rounding is not known"
    if tensor.size:
        with np.errstate(all="ignore"):
            np.multiply(_array(tensor), _array(other), out=_array(tensor))
    return tensor


def _copy(tensor: Tensor, source: Tensor) -> Tensor:
    if (tensor.dtype, tensor.shape) != (source.dtype, source.shape):
        raise RuntimeError(f"copy_ from {source.dtype} {source.shape} to {tensor.dtype} {tensor.shape}")
    if tensor.size:
        _array(tensor)[...] = in_order(source).reshape(source.shape)
    return tensor


def _counted(function: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    def called(tensor: Tensor, *args: Any, **options: Any) -> Any:
        seen.waits += 1
        return function(tensor, *args, **options)

    return called


def _check(name: str, buffer: Tensor, reduce_op: str, seen: Seen) -> None:
    seen.calls.append((name, str(buffer.dtype), reduce_op))
    if str(buffer.dtype) not in seen.dtypes:
        raise RuntimeError(f"HCCL: {name} does not support {buffer.dtype}")
    if reduce_op not in ("sum", "prod", "max", "min"):
        raise RuntimeError(f"HCCL: {name} has no {reduce_op}")
    if not buffer.size or not buffer.is_contiguous():
        raise RuntimeError(f"HCCL: {name} of a view or of nothing")


def _reduced(real: Callable[..., None], buffer: Tensor, reduce_op: str, group: str) -> Tensor:
    """A new tensor, reduced by MCCL; max and min drop NaN."""
    worst = {"max": -math.inf, "min": math.inf}.get(reduce_op)
    whole = buffer * 1.0 if worst is None else mint.where(mint.isnan(buffer), worst, buffer)
    real(whole, reduce_op, group)
    return whole


def _all_reduce(real: Callable[..., None], seen: Seen) -> Callable[..., None]:
    def all_reduce(buffer: Tensor, reduce_op: str, group: str) -> None:
        _check("all_reduce", buffer, reduce_op, seen)
        if buffer.dtype == mindspore.float32:
            buffer.copy_(_reduced(real, buffer, reduce_op, group))
        else:
            real(buffer, reduce_op, group)

    return all_reduce


def _reduce_scatter(real: Callable[..., None], seen: Seen) -> Callable[..., None]:
    """MCCL has none, so all is reduced and a slice kept."""

    def reduce_scatter_tensor(output: Tensor, buffer: Tensor, reduce_op: str, group: str) -> None:
        _check("reduce_scatter", buffer, reduce_op, seen)
        ranks = get_process_group_ranks(group)
        if output.size * len(ranks) != buffer.size:
            raise ValueError(f"{buffer.size} elements do not fill {len(ranks)} outputs of {output.size}")
        first = ranks.index(mint.distributed.get_rank()) * output.size
        output.copy_(_reduced(real, buffer, reduce_op, group)[first : first + output.size] * 1.0)

    return reduce_scatter_tensor

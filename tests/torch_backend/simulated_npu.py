"""A device ``npu`` with process groups ``hccl``, in Python: memory and kernels are the CPU's, the rules a device's.

Tensors do not mix with those of the CPU, and a group that serves ``npu`` alone refuses them, as HCCL does. Call
``set_up`` once per process and ``join`` for such a group; the functions below run on every rank of a pool.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Work
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_library: torch.library.Library | None = None


class _Device:
    """What torch asks of ``torch.npu``."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False


class NpuTensor(torch.Tensor):
    """A tensor that says it is on ``npu:0``; ``raw`` has its values."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, requires_grad: bool = False) -> NpuTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("npu", 0),
            requires_grad=requires_grad,
        )
        made.raw = raw
        return made

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def tolist(self) -> Any:
        return self.raw.tolist()

    def __repr__(self) -> str:
        return f"NpuTensor({self.raw})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "c10d":
            return _collective(func, args)
        target = kwargs.pop("device", None)
        if "copy" not in func.__name__:
            _check_one_device(func, args)
        raw_args, raw_kwargs = tree_map_only(NpuTensor, lambda t: t.raw, (args, kwargs))
        if target is not None:
            raw_kwargs["device"] = "cpu"
        result = func(*raw_args, **raw_kwargs)
        if target is not None and torch.device(target).type == "cpu":
            return result
        if func._schema.is_mutable:
            return args[0] if func._schema.returns else None
        return tree_map_only(torch.Tensor, NpuTensor, result)


def _check_one_device(func: Any, args: Any) -> None:
    for leaf in tree_flatten(args)[0]:
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, NpuTensor) and leaf.ndim:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, npu:0 and cpu found")


def _collective(func: Any, args: Any) -> Any:
    """Hand the values to the backend that the group has for ``npu``."""
    name = func._schema.name
    boxed = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
    backend = dist.ProcessGroup.unbox(boxed)._get_backend(torch.device("npu"))
    if name == "c10d::allreduce_":
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.RedOpType(args[2].op())
        work = backend.allreduce([tensor.raw for tensor in args[0]], options)
        return args[0], Work.boxed(work)
    if name == "c10d::_reduce_scatter_base_":
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.RedOpType(args[3].op())
        work = backend._reduce_scatter_base(args[0].raw, args[1].raw, options)
        return args[0], Work.boxed(work)
    raise NotImplementedError(f"the simulated hccl has no {name}")


def set_up() -> None:
    """Make the device and the ``hccl`` backend known in this process."""
    global _library
    if _library is not None:
        return
    _setup_privateuseone_for_python_backend("npu", backend_module=_Device())
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("empty.memory_format", _empty, "PrivateUse1")
    _library.impl("empty_strided", _empty_strided, "PrivateUse1")
    dist.Backend.register_backend("hccl", ProcessGroupGloo, devices=["npu"])


def join(store: str, backend: str) -> None:
    """Leave the group of the pool, and meet again in one of ``backend`` through a file."""
    set_up()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )


def _empty(size: Any, *, dtype: Any = None, **options: Any) -> NpuTensor:
    return NpuTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **options: Any) -> NpuTensor:
    return NpuTensor(torch.empty_strided(size, stride, dtype=dtype))

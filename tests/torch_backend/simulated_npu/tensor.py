"""The tensor that says it is on ``npu``, and what operators do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

from tests.torch_backend.simulated_npu import collectives, record
from tests.torch_backend.simulated_npu.behaviour import current

ND = 2
_REFUSES_PRIVATE = "_foreach_"
# A tensor that is only handed on keeps its format; every other result is in the plain one.
_KEEPS_FORMAT = ("aten::detach", "aten::alias")
_MULTIPLY = {
    "aten::mul": torch.ops.aten.mul.Tensor,
    "aten::mul_": torch.ops.aten.mul_.Tensor,
    "aten::_foreach_mul": torch.ops.aten._foreach_mul.List,
    "aten::_foreach_mul_": torch.ops.aten._foreach_mul_.List,
}


class NpuTensor(torch.Tensor):
    """A tensor on ``npu:index``. ``raw`` holds its values, unless it is in a private format: then ``blocks`` does."""

    raw: torch.Tensor
    index: int
    npu_format: int
    blocks: Any

    @staticmethod
    def __new__(cls, raw: torch.Tensor, index: int, npu_format: int = ND, blocks: Any = None) -> NpuTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("npu", index),
            requires_grad=False,
        )
        made.raw, made.index, made.npu_format, made.blocks = raw, index, npu_format, blocks
        return made

    def data_ptr(self) -> int:
        return self.values().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values().untyped_storage()

    def values(self) -> torch.Tensor:
        """The memory itself."""
        return self.raw if self.blocks is None else self.blocks.memory

    def tolist(self) -> Any:
        record.wait("tolist")
        return self.plain().tolist()

    def plain(self) -> torch.Tensor:
        """The elements in order; a copy if the format is private."""
        return self.raw if self.blocks is None else self.blocks.unpacked(self.shape)

    def misread(self) -> torch.Tensor:
        """What a view of the memory takes for the elements."""
        return self.raw if self.blocks is None else self.blocks.memory[: self.numel()].view(self.shape)

    def __repr__(self) -> str:
        return f"NpuTensor({self.plain()}, npu:{self.index}, format {self.npu_format})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace in ("c10d", "_c10d_functional"):
            return collectives.run(func, args, NpuTensor)
        record.operator(func._schema.name)
        given = list(_tensors((args, kwargs)))
        tensors = [tensor for tensor in given if isinstance(tensor, NpuTensor)]
        _check(func, given, tensors)
        if func._schema.name in _KEEPS_FORMAT and tensors[0].blocks is not None:
            return NpuTensor(tensors[0].raw, tensors[0].index, tensors[0].npu_format, tensors[0].blocks)
        return _run(func, args, kwargs, given)


def _run(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
    """The CPU's operator on the values; results go where the arguments or ``device`` say."""
    tensors = [tensor for tensor in given if isinstance(tensor, NpuTensor)]
    index = tensors[0].index
    to_host = False
    if (target := kwargs.get("device")) is not None:
        target = torch.device(target)
        kwargs["device"] = "meta" if target.type == "meta" else "cpu"
        to_host = target.type != "npu"
        if not to_host and index_of(target) != index:
            index = index_of(target)
            record.wait(f"{func._schema.name} between devices")
    if kwargs.get("dtype") is torch.float64 and target is None and current().float64 == "cast to float32":
        kwargs["dtype"] = torch.float32
    _note_waits(func, args, kwargs, to_host)
    in_memory = current().private_views == "memory" and _is_view(func)
    plain = {id(tensor): tensor.misread() if in_memory else tensor.plain() for tensor in tensors}
    known = {id(plain.get(id(tensor), tensor)): tensor for tensor in given}
    raw_args, raw_kwargs = _mapped(lambda tensor: plain.get(id(tensor), tensor), (args, kwargs))
    if func._schema.name in _MULTIPLY and current().scalars == "rounded":
        func, raw_args = _with_rounded_scalar(func, raw_args)
    result = func(*raw_args, **raw_kwargs)
    for written in _written(func, args, kwargs):
        if written.blocks is not None:
            written.blocks.pack(plain[id(written)])
    if to_host:
        return result

    def owner(raw: torch.Tensor) -> torch.Tensor:
        return known[id(raw)] if id(raw) in known else on_device(raw, index, func)

    return _mapped(owner, result)


def _with_rounded_scalar(func: Any, args: Any) -> tuple[Any, Any]:
    """A product of tensors and a 0-d tensor, which gets the dtype of the result first."""
    first, scalar = args
    if not isinstance(scalar, torch.Tensor) or scalar.ndim:
        return func, args
    in_list = isinstance(first, list | tuple)
    rounded = [scalar.to(torch.result_type(tensor, scalar)) for tensor in (first if in_list else [first])]
    return _MULTIPLY[func._schema.name], (first, rounded if in_list else rounded[0])


def _mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The value with its tensors replaced; operators take them in lists and tuples."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)([_mapped(function, member) for member in value])
    return {key: _mapped(function, v) for key, v in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors(member)


def on_device(raw: torch.Tensor, index: int, func: Any) -> NpuTensor:
    """A tensor of the device.

    Raises:
        RuntimeError: the device has no float64.
    """
    if raw.dtype is torch.float64 and current().float64 != "computed":
        raise RuntimeError(f"{func}: the simulated NPU has no float64")
    return NpuTensor(raw, index)


def index_of(device: torch.device | None) -> int:
    """The index of a device, which is the current one if it says none."""
    return torch.npu.current_device() if device is None or device.index is None else device.index  # type: ignore[attr-defined]


def _check(func: Any, given: list[torch.Tensor], tensors: list[NpuTensor]) -> None:
    name = func._schema.name
    refuses = _REFUSES_PRIVATE in name and not current().foreach_takes_private
    if refuses and any(tensor.blocks is not None for tensor in tensors):
        operator = name.removeprefix("aten::")
        raise RuntimeError(f"Current operator {operator} do not support internal format.")
    if "copy" in name:
        return
    found = {f"npu:{tensor.index}" for tensor in tensors}
    found.update(str(t.device) for t in given if not isinstance(t, NpuTensor) and t.ndim)
    if len(found) > 1:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {sorted(found)}")


def _note_waits(func: Any, args: Any, kwargs: Any, to_host: bool) -> None:
    """Where the host waits: see ``copy_between_host_and_device`` in torch_npu's CopyKernel.cpp.

    A blocking copy synchronises the stream, and so does CANN's aclrtMemcpyAsync for memory that is not page-locked.
    """
    name = func._schema.name
    if to_host and kwargs.get("device") == "cpu":
        record.wait(f"{name} to the host")
    elif name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select"):
        record.wait(name)
    elif name == "aten::copy_":
        target, source = args[0], args[1]
        on_host = [not isinstance(tensor, NpuTensor) for tensor in (target, source)]
        if on_host[0] or on_host[1]:
            host = target if on_host[0] else source
            if not (host.is_pinned() and len(args) > 2 and args[2]):
                record.wait(f"{name} {'to' if on_host[0] else 'from'} the host")
        elif target.index != source.index:
            record.wait(f"{name} between devices")


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[NpuTensor]:
    for position, name in _writes(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from (tensor for tensor in _tensors(value) if isinstance(tensor, NpuTensor))


@lru_cache(maxsize=1024)
def _is_view(func: Any) -> bool:
    aliases = [result.alias_info for result in func._schema.returns if result.alias_info is not None]
    return any(not alias.is_write for alias in aliases)


@lru_cache(maxsize=1024)
def _writes(func: Any) -> list[tuple[int, str]]:
    """Position and name of the arguments that an operator writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(at, a.name) for at, a in arguments if a.alias_info is not None and a.alias_info.is_write]

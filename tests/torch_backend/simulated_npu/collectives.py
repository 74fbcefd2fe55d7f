"""The collectives of ``hccl``: gloo moves the values, and the rules are torch_npu's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed.distributed_c10d import _resolve_process_group

from tests.torch_backend.simulated_npu import record
from tests.torch_backend.simulated_npu.behaviour import current

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
_NAMES = {int(op): name for name, op in _OPS.items()}
# What never wins, put where a maximum or minimum is to drop a NaN.
_LOSES = {"max": -torch.inf, "min": torch.inf}


def run(func: Any, args: Any, wrap: Callable[[torch.Tensor, int], Any]) -> Any:
    """Hand the values to the backend that the group has for ``npu``."""
    name = func._schema.name.partition("::")[2]
    handler = (_FUNCTIONAL if func.namespace == "_c10d_functional" else _EAGER).get(name)
    if handler is None:
        raise NotImplementedError(f"the simulated hccl has no {func}")
    return handler(args, wrap)


# ---- what moves values


def _backend(group: Any) -> Any:
    return group._get_backend(torch.device("npu"))


def _unboxed(args: Any) -> Any:
    boxed = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
    return dist.ProcessGroup.unbox(boxed)


def _note(name: str, tensor: Any, reduce_op: str, group: Any) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    record.collective(record.Collective(name, dtype, reduce_op, tuple(dist.get_process_group_ranks(group))))


def _check(name: str, tensor: Any, reduce_op: str, group: Any) -> None:
    """Raise if HCCL does not reduce this dtype, or not by this op."""
    _note(name, tensor, reduce_op, group)
    if tensor.dtype not in current().reduced:
        raise RuntimeError(f"HCCL {name}: Unsupported data type {tensor.dtype}")
    if reduce_op == "avg" and current().average == "refused":
        raise RuntimeError("Cannot use ReduceOp.AVG with HCCL")


def _all_reduced(values: torch.Tensor, reduce_op: str, group: Any) -> Work:
    """In place."""
    if reduce_op in _LOSES and values.is_floating_point():
        nan = values.isnan()
        values.masked_fill_(nan, _LOSES[reduce_op])
        if current().maximum_keeps_nan:
            anywhere = nan.float()
            _all_reduced(anywhere, "sum", group).wait()
            work = _all_reduced_as(values, reduce_op, group)
            work.wait()
            values.masked_fill_(anywhere > 0, torch.nan)
            return work
    return _all_reduced_as(values, reduce_op, group)


def _all_reduced_as(values: torch.Tensor, reduce_op: str, group: Any) -> Work:
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS["sum" if reduce_op == "avg" else reduce_op]
    work = _backend(group).allreduce([values], options)
    if reduce_op == "avg":
        work.wait()
        values.div_(group.size())
    return work


def _reduce_scattered(output: torch.Tensor, values: torch.Tensor, reduce_op: str, group: Any) -> Work:
    whole = values.clone()
    work = _all_reduced(whole, reduce_op, group)
    work.wait()
    output.copy_(whole.view(group.size(), -1)[group.rank()].view(output.shape))
    return work


# ---- torch.distributed


def _all_reduce(args: Any, wrap: Any) -> Any:
    group = _unboxed(args)
    (tensor,) = args[0]
    reduce_op = _NAMES[args[2].op()]
    _check("AllReduce", tensor, reduce_op, group)
    return args[0], Work.boxed(_all_reduced(tensor.raw, reduce_op, group))


def _reduce_scatter(args: Any, wrap: Any) -> Any:
    output, tensor, group = args[0], args[1], _unboxed(args)
    reduce_op = _NAMES[args[3].op()]
    _check("ReduceScatter", tensor, reduce_op, group)
    return output, Work.boxed(_reduce_scattered(output.raw, tensor.raw, reduce_op, group))


def _all_gather_base(args: Any, wrap: Any) -> Any:
    output, tensor, group = args[0], args[1], _unboxed(args)
    _note("AllGather", tensor, "", group)
    return output, Work.boxed(_backend(group)._allgather_base(output.raw, tensor.raw))


def _all_gather(args: Any, wrap: Any) -> Any:
    group = _unboxed(args)
    _note("AllGather", args[1][0], "", group)
    outputs = [[tensor.raw for tensor in row] for row in args[0]]
    return args[0], Work.boxed(_backend(group).allgather(outputs, [tensor.raw for tensor in args[1]]))


def _broadcast(args: Any, wrap: Any) -> Any:
    group = _unboxed(args)
    _note("Broadcast", args[0][0], "", group)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = args[2], args[3]
    return args[0], Work.boxed(_backend(group).broadcast([tensor.raw for tensor in args[0]], options))


def _scatter(args: Any, wrap: Any) -> Any:
    group = _unboxed(args)
    _note("Scatter", args[0][0], "", group)
    options = dist.ScatterOptions()
    options.rootRank = args[3]
    inputs = [[tensor.raw for tensor in row] for row in args[1]]
    return args[0], Work.boxed(_backend(group).scatter([tensor.raw for tensor in args[0]], inputs, options))


# ---- torch.distributed._functional_collectives, which DTensor uses


def _functional_all_reduce(args: Any, wrap: Any) -> Any:
    tensor, reduce_op, group = args[0], args[1], _resolve_process_group(args[2])
    values = tensor.raw.clone()
    _check("AllReduce", tensor, reduce_op, group)
    _all_reduced(values, reduce_op, group).wait()
    return wrap(values, tensor.index)


def _functional_reduce_scatter(args: Any, wrap: Any) -> Any:
    tensor, reduce_op, group_size, group = args[0], args[1], args[2], _resolve_process_group(args[3])
    output = tensor.raw.new_empty(tensor.shape[0] // group_size, *tensor.shape[1:])
    _check("ReduceScatter", tensor, reduce_op, group)
    _reduce_scattered(output, tensor.raw, reduce_op, group)
    return wrap(output, tensor.index)


def _functional_all_gather(args: Any, wrap: Any) -> Any:
    tensor, group_size, group = args[0], args[1], _resolve_process_group(args[2])
    _note("AllGather", tensor, "", group)
    output = tensor.raw.new_empty(tensor.shape[0] * group_size, *tensor.shape[1:])
    _backend(group)._allgather_base(output, tensor.raw.contiguous()).wait()
    return wrap(output, tensor.index)


_EAGER: dict[str, Callable[[Any, Any], Any]] = {
    "allreduce_": _all_reduce,
    "_reduce_scatter_base_": _reduce_scatter,
    "_allgather_base_": _all_gather_base,
    "allgather_": _all_gather,
    "broadcast_": _broadcast,
    "scatter_": _scatter,
}
_FUNCTIONAL: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": _functional_all_reduce,
    "reduce_scatter_tensor": _functional_reduce_scatter,
    "all_gather_into_tensor": _functional_all_gather,
    "wait_tensor": lambda args, wrap: args[0],
    "_wrap_tensor_autograd": lambda args, wrap: wrap(args[0].raw.view_as(args[0].raw), args[0].index),
}

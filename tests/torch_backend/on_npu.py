"""What ranks of a pool do on the simulated NPU, once they have joined a group that serves it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hyper_parallel
from hyper_parallel import Partial, Shard, attach_layout
from tests.torch_backend import models, simulated_npu
from tests.torch_backend.simulated_npu.record import Collective

_OPS = {"avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _parameter(values: list[float]) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros(len(values)).to("npu"))
    parameter.grad = torch.tensor(values).to("npu")
    return parameter


def clip_model(strategy: str, norm_types: tuple[float, ...], max_norm: float) -> list[dict[str, Any]]:
    """``models.clip`` on one device per process, as with ``ASCEND_RT_VISIBLE_DEVICES``.

    Torch's autograd engine knows one device of a backend that is written in Python.
    """
    torch.npu.set_device(0)  # type: ignore[attr-defined]
    return models.clip(strategy, norm_types, max_norm, "npu")


def calls_of_a_later_step(
    strategy: str, p: float, foreach: bool | None
) -> tuple[list[str], list[Collective]]:
    """What the host waits for, and the collectives, when a model is clipped for the second time."""
    torch.npu.set_device(0)  # type: ignore[attr-defined]
    model = models.trained(strategy, "npu")
    hyper_parallel.clip_grad_norm_(model, 1.0, p, foreach=foreach)
    with simulated_npu.recorded() as calls:
        hyper_parallel.clip_grad_norm_(model, 0.5, p, foreach=foreach)
    return calls.waits, calls.collectives


CALLS: dict[str, Callable[[list[torch.Tensor], torch.Tensor], Any]] = {
    "clip_grad_norm_": lambda parameters, norm: hyper_parallel.clip_grad_norm_(parameters, 0.1),
    "clip_grads_with_norm_": lambda parameters, norm: hyper_parallel.clip_grads_with_norm_(
        parameters, 0.1, norm
    ),
    "clip_grads": lambda parameters, norm: hyper_parallel.clip_grads(
        [parameter.grad for parameter in parameters], 0.1, params=parameters
    ),
    "clip_grad_value_": lambda parameters, norm: hyper_parallel.clip_grad_value_(parameters, 0.1),
    "get_total_norm": lambda parameters, norm: hyper_parallel.get_total_norm(
        [parameter.grad for parameter in parameters if parameter.grad is not None]
    ),
}


def waits_of_steps(call: str, dtype: torch.dtype, missing: list[int]) -> list[list[str]]:
    """What the host waits for in each step of an FSDP model of ``dtype``, with new gradients each time.

    The first step has all gradients, and the others none for the parameters ``missing``.
    """
    torch.npu.set_device(0)  # type: ignore[attr-defined]
    parameters = list(models.trained("fsdp", "npu", dtype).parameters())
    norm = hyper_parallel.clip_grad_norm_(parameters, math.inf)
    waits = []
    for step in range(4):
        for index, parameter in enumerate(parameters):
            gradient = parameter.grad
            parameter.grad = None if gradient is None or (step and index in missing) else gradient.clone()
        with simulated_npu.recorded() as calls:
            CALLS[call](parameters, norm)
        waits.append(calls.waits)
        assert calls.operators
    return waits


def clip_nan_of_rank_1(p: float) -> tuple[float, list[float]]:
    mesh = init_device_mesh("npu", (2,))
    parameter = attach_layout(_parameter([math.nan if dist.get_rank() else 2.0, 1.0]), mesh, [Shard(0)])
    norm = hyper_parallel.clip_grad_norm_([parameter], 1.0, p)
    return norm.item(), parameter.grad.tolist()


def collectives_of_a_partial(reduce_op: str) -> list[Collective]:
    parameter = attach_layout(_parameter([3.0, -4.0]), init_device_mesh("npu", (2,)), [Partial(reduce_op)])
    with simulated_npu.recorded() as calls:
        hyper_parallel.clip_grad_norm_([parameter], 1.0)
    return calls.collectives


def all_reduce_error(dtype: torch.dtype) -> str:
    return _message(lambda: dist.all_reduce(torch.zeros(2).to("npu").to(dtype)))


def reductions() -> dict[str, Any]:
    """1 and 2 by AVG, 1 and NaN by MAX and MIN: the result, or the error."""
    found: dict[str, Any] = {}
    for name, op in _OPS.items():
        other = 2.0 if name == "avg" else math.nan
        tensor = torch.tensor([other if dist.get_rank() else 1.0]).to("npu")
        found[name] = _message(lambda tensor=tensor, op=op: dist.all_reduce(tensor, op)) or tensor.item()
    return found


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""

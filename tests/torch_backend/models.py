"""Real models sharded with torch's own APIs; these functions run on every rank of a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hyper_parallel

_WIDTH = 12


class Block(nn.Module):
    """A feed-forward block with a norm whose weight tensor parallelism does not shard."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(_WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fsdp(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _tp_fsdp(model: Model, device_type: str) -> None:
    mesh = init_device_mesh(device_type, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    fsdp(model, mesh["dp"])


def _hsdp(model: Model, device_type: str) -> None:
    shape = (2, dist.get_world_size() // 2)
    fsdp(model, init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard")))


def _line(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),))


STRATEGIES: dict[str, Callable[[Model, str], None]] = {
    "fsdp": lambda model, device_type: fsdp(model, _line(device_type)),
    "hsdp": _hsdp,
    "tp": lambda model, device_type: tensor_parallel(model, _line(device_type)),
    "tp+fsdp": _tp_fsdp,
}


def trained(strategy: str | None, device_type: str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """A model with gradients of one batch, the same global batch on all ranks, sharded as ``strategy`` says."""
    torch.manual_seed(0)
    model = Model().to(device_type, dtype)
    batch = torch.randn(3, 4, _WIDTH).to(device_type, dtype)
    if strategy is not None:
        STRATEGIES[strategy](model, device_type)
    model(batch).square().sum().backward()
    return model


def reference_gradients() -> list[np.ndarray]:
    """The gradients of the same model and batch on one process."""
    return gradients(trained(None))


def clip(
    strategy: str, norm_types: tuple[float, ...], max_norm: float, device_type: str = "cpu"
) -> list[dict[str, Any]]:
    """Clip the same gradients once per norm type."""
    model = trained(strategy, device_type)
    before = [parameter.grad for parameter in model.parameters()]
    saved = [_local(gradient).clone() for gradient in before]
    results = []
    for p in norm_types:
        _restore(before, saved)
        norm = hyper_parallel.clip_grad_norm_(model, max_norm, p)
        same = all(
            parameter.grad is gradient for parameter, gradient in zip(model.parameters(), before, strict=True)
        )
        results.append({"norm": norm.item(), "gradients": gradients(model), "in place": same})
    return results


def beside_torch(strategy: str, foreach: bool | None) -> dict[str, Any]:
    """Clip by our call and by torch's; ``torch`` is the name of the error where torch's own raises."""
    model = trained(strategy)
    before = [parameter.grad for parameter in model.parameters()]
    saved = [_local(gradient).clone() for gradient in before]
    found: dict[str, Any] = {"ours": hyper_parallel.clip_grad_norm_(model, 1.0, foreach=foreach).item()}
    found["our gradients"] = gradients(model)
    _restore(before, saved)
    try:
        found["torch"] = _whole(
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        ).item()
    except RuntimeError as error:
        found["torch"] = type(error).__name__
    found["torch gradients"] = gradients(model)
    return found


def collectives(strategy: str) -> tuple[list[str], list[str]]:
    """The collectives of a first and of a later call, as the profiler saw them."""
    model = trained(strategy)
    return _profiled(lambda: hyper_parallel.clip_grad_norm_(model, 1.0)), _profiled(
        lambda: hyper_parallel.clip_grad_norm_(model, 1.0)
    )


def _profiled(call: Callable[[], Any]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sorted(event.name for event in profile.events() if event.name.startswith("c10d::"))


def gradients(model: nn.Module) -> list[np.ndarray]:
    return [_whole(parameter.grad).detach().cpu().double().numpy() for parameter in model.parameters()]


def _restore(gradients: list[torch.Tensor], saved: list[torch.Tensor]) -> None:
    for gradient, values in zip(gradients, saved, strict=True):
        _local(gradient).copy_(values)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def staged(strategy: str, excluded: list[str]) -> dict[str, Any]:
    """The staged norm of a real model, with its FQNs."""
    model = trained(strategy)
    plan = hyper_parallel.build_norm_shard_plan(model, excluded)
    norm_sq, refs = hyper_parallel.dense_grad_norm_sq_and_refs(model, excluded, plan)
    hyper_parallel.scale_grad_refs_(refs, 0.5)
    return {"norm_sq": norm_sq.item(), "fqns": list(plan.representatives), "gradients": gradients(model)}

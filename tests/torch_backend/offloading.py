"""Gradients on the CPU, on the simulated ``npu``, or on both; runs on every rank of a pool."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

import hyper_parallel
from hyper_parallel import Partial, Replicate, Shard, attach_layout
from tests.torch_backend import simulated_npu


def join(store: str, backend: str) -> list[str]:
    """The device types that the group of all ranks serves."""
    simulated_npu.join(store, backend)
    assert dist.group.WORLD is not None
    return sorted(device.type for device in dist.group.WORLD._device_types)


def _parameter(values: list[float], device: str) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros(len(values)).to(device))
    parameter.grad = torch.tensor(values).to(device)
    return parameter


def _sharded(values: list[float], device: str, mesh: DeviceMesh) -> torch.Tensor:
    return attach_layout(_parameter(values, device), mesh, [Shard(0)])


def _clip(parameters: list[torch.Tensor], p: float = 2.0, **options: Any) -> tuple[float, str, list[Any]]:
    """The norm, its device, and the device and values of each gradient after clipping."""
    norm = hyper_parallel.clip_grad_norm_(parameters, 1.0, p, **options)
    gradients = [
        g._local_tensor if isinstance(g, DTensor) else g for g in (parameter.grad for parameter in parameters)
    ]
    return norm.item(), norm.device.type, [(g.device.type, g.tolist()) for g in gradients]


def plain(device: str, mesh_device: str, p: float, foreach: bool | None) -> Any:
    """Rank 0 holds [3], rank 1 holds [4], and both hold [12]."""
    mesh = init_device_mesh(mesh_device, (2,))
    own = [3.0 + dist.get_rank()]
    whole = attach_layout(_parameter([12.0], device), mesh, [Replicate()])
    return _clip([_sharded(own, device, mesh), whole], p, foreach=foreach)


def both_devices(first: str, mesh_device: str, p: float, foreach: bool | None) -> Any:
    """The same, with the sharded gradient on one device and the others on the other."""
    mesh = init_device_mesh(mesh_device, (2,))
    other = {"cpu": "npu", "npu": "cpu"}[first]
    own = [3.0 + dist.get_rank()]
    return _clip([_sharded(own, first, mesh), _parameter([12.0], other)], p, foreach=foreach)


def one_term_on_both_devices(first: str, p: float) -> Any:
    mesh = init_device_mesh("npu", (2,))
    other = {"cpu": "npu", "npu": "cpu"}[first]
    own = 3.0 + dist.get_rank()
    return _clip([_sharded([own], first, mesh), _sharded([0.0, 12.0], other, mesh)], p)


def dtensor() -> Any:
    """A DTensor of the simulated device, as ``fully_shard`` would leave it."""
    mesh = init_device_mesh("npu", (2,))
    local = torch.tensor([3.0 + dist.get_rank()]).to("npu")
    parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros(1).to("npu"), mesh, [TorchShard(0)]))
    parameter.grad = DTensor.from_local(local, mesh, [TorchShard(0)])
    return _clip([parameter, _parameter([12.0], "npu")])


def partial(device: str, p: float) -> Any:
    """[1, -3] and [2, 1] add up to [3, -2]."""
    mesh = init_device_mesh("npu", (2,))
    values = [[1.0, -3.0], [2.0, 1.0]][dist.get_rank()]
    return _clip([attach_layout(_parameter(values, device), mesh, [Partial()])], p)


def stages(devices: tuple[str, ...], p: float) -> Any:
    """Two pipeline stages: [3, 4] on the first device, and on the second too, if there is one; else no parameters."""
    mesh = init_device_mesh("npu", (2,), mesh_dim_names=("pp",))
    own = [_parameter([3.0, 4.0], device) for device in devices[dist.get_rank() :][:1]]
    return _clip(own, p, pp_mesh=mesh)


def missing_on_one_rank(device: str) -> Any:
    mesh = init_device_mesh("npu", (2,))
    parameter = _sharded([5.0], device, mesh)
    if dist.get_rank() == 1:
        parameter.grad = None
        return hyper_parallel.clip_grad_norm_([parameter], 1.0).item()
    return _clip([parameter])[0]

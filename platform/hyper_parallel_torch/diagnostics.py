"""What ``hyper-parallel doctor`` asks of PyTorch: its devices, and an all-reduce on them.

Entry point ``torch`` of group ``hyper_parallel.diagnostics``; ``hyper_parallel.cli.doctor.child`` says who calls what
when. Run with gloo on the CPU; on CUDA with NCCL and on an NPU with HCCL it was not run, for want of the machines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

packages = ("torch", "torch_npu")
has_scheduler = False

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def prepare() -> None:
    """Import torch alone, so that an extension that fails is seen to be the one at fault."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def describe(imported: Sequence[str]) -> Mapping[str, Any]:
    """The CPU, and the devices of CUDA and torch_npu that can be used."""
    import torch

    found = {"cpu": ["cpu"]}
    types = ["cuda"] if "torch_npu" not in imported else ["cuda", "npu"]
    for device, module in ((device, getattr(torch, device)) for device in types):
        if module.is_available():
            found[device] = [str(module.get_device_name(index)) for index in range(module.device_count())]
    return {
        "devices": [
            {"type": device, "backend": _BACKENDS[device], "names": names} for device, names in found.items()
        ]
    }


def join(device: str, rank: int, world_size: int, port: int, folder: str, timeout: float) -> None:
    """Join the group of all ranks of the device's own backend, by way of a file: no socket to listen on."""
    import torch
    import torch.distributed as dist

    if device == "npu":
        import torch_npu  # noqa: F401  registers the device and its backend
    if device != "cpu":
        getattr(torch, device).set_device(rank)
    dist.init_process_group(
        _BACKENDS[device],
        init_method=f"file://{Path(folder) / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )


def all_reduce(device: str, number: float) -> float:
    """The sum over the ranks."""
    import torch
    import torch.distributed as dist

    buffer = torch.full((4,), number, device=device)
    dist.all_reduce(buffer)
    return float(buffer.mean())

"""Ranks for the parity suite: torch processes on this machine with gloo on the loopback interface, or torchrun's.

Entry point ``torch`` of group ``hyper_parallel.local_ranks``; ``hyper_parallel.parity.local_ranks`` says who calls
what when. torchrun's ranks were run on the CPU with gloo; CUDA with NCCL and Ascend with HCCL were not.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.parity.local_ranks import DeviceMissing

has_scheduler = False

_HOST = "127.0.0.1"


def prepare() -> None:
    """Import what every rank would otherwise import by itself."""
    importlib.import_module("torch.distributed.tensor")
    importlib.import_module("torch.distributed.fsdp")


def join(rank: int, world_size: int, port: int, timeout: float) -> None:
    """Join the gloo group of all ranks, a group of one included.

    Raises:
        RuntimeError: the others did not come within ``timeout`` seconds.
    """
    os.environ.update(
        MASTER_ADDR=_HOST,
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(int(os.environ.get("HYPER_PARALLEL_THREADS", "1")))
    limit = timedelta(seconds=timeout)
    # Left to itself the store listens on every interface of the machine.
    listener = _listen(port) if rank == 0 else None
    # Up to torch 2.8 the store by libuv takes no listener.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        _HOST, port, world_size, rank == 0, limit, master_listen_fd=listener, use_libuv=False
    )
    # The time-out of a call is the pool's; this one only has to be out of its way.
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=max(limit, timedelta(hours=1))
    )


def join_launched(device_type: str, timeout: float) -> None:
    """Take the device numbered ``LOCAL_RANK`` and join the group that ``MASTER_ADDR``, ``RANK`` and others describe.

    Raises:
        DeviceMissing: the machine has no such device, or torch no backend for it.
        RuntimeError: the others did not come within ``timeout`` seconds.
    """
    if device_type == "npu" and not hasattr(torch, "npu"):
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            raise DeviceMissing(f"torch_npu cannot be imported: {error}") from error
    if device_type != "cpu":
        _take_device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
    backends = dist.Backend.default_device_backend_map
    if device_type not in backends:
        raise DeviceMissing(f"torch knows no backend for {device_type!r}, only for {sorted(backends)}")
    dist.init_process_group(backends[device_type], timeout=timedelta(seconds=timeout))


def _take_device(device_type: str, index: int) -> None:
    module: Any = getattr(torch, device_type, None)
    if module is None or not module.is_available():
        raise DeviceMissing(
            f"torch {torch.__version__} finds no {device_type} device on {socket.gethostname()}"
        )
    if index >= module.device_count():
        raise DeviceMissing(
            f"LOCAL_RANK is {index}, but {socket.gethostname()} has {module.device_count()} {device_type} devices"
        )
    module.set_device(index)


def describe(device_type: str) -> Mapping[str, str]:
    """The device's name, the group's backend, and the versions of CUDA and NCCL where they are in use."""
    found = {"backend": str(dist.get_backend())}
    module: Any = getattr(torch, device_type, None)
    if device_type != "cpu" and hasattr(module, "get_device_name"):
        found["device"] = f"{module.get_device_name()} ({device_type}:{module.current_device()})"
    if device_type == "cuda":
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def leave() -> None:
    """Destroy the groups, which ends their threads."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _listen(port: int) -> int:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((_HOST, port))
    sock.listen(128)
    return sock.detach()

"""Ranks on one machine for the parity suite: torch processes with gloo on the loopback interface.

Entry point ``torch`` of group ``hyper_parallel.local_ranks``; ``hyper_parallel.parity.rank_server`` says who calls
what when.
"""

from __future__ import annotations

import importlib
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

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
    store = dist.TCPStore(_HOST, port, world_size, rank == 0, limit, master_listen_fd=listener)  # type: ignore[attr-defined]
    # The time-out of a call is the pool's; this one only has to be out of its way.
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=max(limit, timedelta(hours=1))
    )


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

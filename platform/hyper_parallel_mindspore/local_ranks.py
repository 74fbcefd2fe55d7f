"""Ranks on one machine for the parity suite: MindSpore processes on the CPU with MCCL.

Entry point ``mindspore`` of group ``hyper_parallel.local_ranks``; ``hyper_parallel.parity.rank_server`` says who
calls what when. MindSpore needs a scheduler process, for a world of one as well: with it a lone rank is in a real
group of one, and without an initialised group a collective ends the process.

The variables below are read while MindSpore is imported, hence the imports inside functions; the package's
``__init__`` must not import MindSpore, either.
"""

from __future__ import annotations

import importlib
import os

has_scheduler = True

_HOST = "127.0.0.1"


def prepare() -> None:
    """Import MindSpore, quietly and with the shortest waits it knows between attempts to connect."""
    os.environ.setdefault("GLOG_v", "4")
    os.environ.update(MS_RETRY_INTERVAL_LOWER="1", MS_RETRY_INTERVAL_UPPER="1")
    importlib.import_module("mindspore.communication")
    importlib.import_module("mindspore.mint.distributed")


def join(rank: int, world_size: int, port: int, timeout: float) -> None:
    """Join the MCCL group of all ranks; as rank -1 be the scheduler, and return when the ranks are done.

    Raises:
        RuntimeError: the others did not come within ``timeout`` seconds.
    """
    os.environ.update(
        MS_WORKER_NUM=str(world_size),
        MS_SCHED_HOST=_HOST,
        MS_SCHED_PORT=str(port),
        MS_TOPO_TIMEOUT=str(max(1, int(timeout))),
        RANK_SIZE=str(world_size),
        MS_ROLE="MS_SCHED" if rank < 0 else "MS_WORKER",
    )
    # A scheduler with the number of a worker would be counted as that worker.
    for name in ("MS_NODE_ID", "RANK_ID", "DEVICE_ID"):
        if rank < 0:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(rank)
    import mindspore
    from mindspore.communication import init

    mindspore.set_device("CPU")
    # Asynchronous errors surface at a later, unrelated operation, and synchronous calls are faster on a CPU.
    mindspore.set_context(pynative_synchronize=True)
    init("mccl")


def leave() -> None:
    """Leave nothing to do: a rank that releases its group early can hang the others, and its end releases it."""

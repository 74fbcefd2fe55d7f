"""Ranks for the parity suite: MindSpore processes on the CPU with MCCL, or those of msrun.

Entry point ``mindspore`` of group ``hyper_parallel.local_ranks``; ``hyper_parallel.parity.local_ranks`` says who
calls what when. MindSpore needs a scheduler process, for a world of one as well: with it a lone rank is in a real
group of one, and without an initialised group a collective ends the process. msrun's ranks were run on the CPU; on
Ascend they were not.

The variables below are read while MindSpore is imported, hence the imports inside functions; the package's
``__init__`` must not import MindSpore, either.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Mapping

from hyper_parallel.parity.local_ranks import DeviceMissing

has_scheduler = True

_HOST = "127.0.0.1"
_TARGETS = {"cpu": "CPU", "npu": "Ascend"}


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
    describe_group(rank, world_size, port, timeout)
    start("cpu")


def describe_group(rank: int, world_size: int, port: int, timeout: float) -> None:
    """Set the variables by which this process, as rank -1 the scheduler, finds the others at ``port`` of this machine."""
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


def start(device_type: str, index: int | None = None) -> None:
    """Take the device (of its kind the one numbered ``index``) and join the group that the variables describe."""
    import mindspore
    from mindspore import mint
    from mindspore.communication import init

    mindspore.set_device(_TARGETS[device_type], index)
    # Asynchronous errors surface at a later, unrelated operation, and synchronous calls are faster on a CPU.
    mindspore.set_context(pynative_synchronize=True)
    if device_type == "cpu":
        init("mccl")
    else:
        mint.distributed.init_process_group()


def join_launched(device_type: str, timeout: float) -> None:
    """Join the group that msrun's variables describe; in its scheduler, return when the ranks are done.

    How long the ranks wait for each other is msrun's ``--cluster_time_out``.

    Raises:
        DeviceMissing: ``device_type`` is neither "cpu" nor "npu", or MindSpore cannot use the NPU.
    """
    if device_type not in _TARGETS:
        raise DeviceMissing(f"MindSpore runs on {' and '.join(_TARGETS)}, not on {device_type}")
    os.environ.setdefault("GLOG_v", "3")
    import mindspore

    if device_type == "npu" and not mindspore.device_context.ascend.is_available():
        raise DeviceMissing(
            f"MindSpore {mindspore.__version__} finds no npu device on {socket.gethostname()}"
        )
    start(device_type)


def describe(device_type: str) -> Mapping[str, str]:
    """The group's backend, and the name of the NPU."""
    import mindspore

    if device_type == "cpu":
        return {"backend": "mccl"}
    name = mindspore.hal.get_device_name(int(os.environ.get("DEVICE_ID", "0")))
    return {"backend": "hccl", "device": f"{name} (npu:{os.environ.get('DEVICE_ID', '0')})"}


def leave() -> None:
    """Leave nothing to do: a rank that releases its group early can hang the others, and its end releases it."""

"""What ``hyper-parallel doctor`` asks of MindSpore: its devices, and an all-reduce on them.

Entry point ``mindspore`` of group ``hyper_parallel.diagnostics``; ``hyper_parallel.cli.doctor.child`` says who calls
what when. Run with MCCL on the CPU; on an NPU with HCCL it was not run, for want of the machine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel_mindspore import local_ranks

packages = ("mindspore",)
has_scheduler = True


def prepare() -> None:
    """Only errors in the log, and the shortest waits between attempts to connect; read during the import."""
    os.environ.setdefault("GLOG_v", "3")
    os.environ.update(MS_RETRY_INTERVAL_LOWER="1", MS_RETRY_INTERVAL_UPPER="1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def describe(imported: Sequence[str]) -> Mapping[str, Any]:
    """The CPU, NPUs if MindSpore can use them or else why not, and the CANN versions that it accepts."""
    from mindspore import device_context

    found: dict[str, Any] = {
        "devices": [{"type": "cpu", "backend": "mccl", "names": ["cpu"]}],
        "cann_versions": _cann_versions(),
    }
    if device_context.ascend.is_available():
        names = [f"Ascend {index}" for index in range(device_context.ascend.device_count())]
        found["devices"].append({"type": "npu", "backend": "hccl", "names": names})
    else:
        found["no_npu"] = _why_no_npu()
    return found


def _cann_versions() -> list[str]:
    """As MindSpore compares with CANN's own when it starts on an NPU; not a public interface, so it may be gone."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from mindspore.run_check._check_version import AscendEnvChecker

        return [str(each) for each in AscendEnvChecker("").version]
    return []


def _why_no_npu() -> str | None:
    """What went wrong when MindSpore loaded its plug-in; not a public interface, so it may be gone."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from mindspore._c_expression import MSContext

        lines = str(MSContext.get_instance().load_plugin_error()).splitlines()
        # Plug-ins for other devices fail, too, where those are not there.
        return next((line.strip() for line in lines if "ascend" in line), None)
    return None


def join(device: str, rank: int, world_size: int, port: int, folder: str, timeout: float) -> None:
    """Join the group of all ranks; as rank -1 be the scheduler, and return when the ranks are done."""
    local_ranks.describe_group(rank, world_size, port, timeout)
    local_ranks.start(device, max(rank, 0) if device == "npu" else None)


def all_reduce(device: str, number: float) -> float:
    """The sum over the ranks."""
    import mindspore
    from mindspore import Tensor, mint

    buffer = Tensor([number] * 4, mindspore.float32)
    mint.distributed.all_reduce(buffer)
    return float(buffer.mean())

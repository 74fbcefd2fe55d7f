"""The MindSpore platform, put together from its roles for the device that the process runs on."""

from __future__ import annotations

import mindspore

from hyper_parallel_mindspore.ascend_math import AscendMath
from hyper_parallel_mindspore.collectives import AscendCollectives, HostCollectives
from hyper_parallel_mindspore.construction import MindSporeConstruction
from hyper_parallel_mindspore.host_math import HostMath
from hyper_parallel_mindspore.parameters import MindSporeParameters


class MindSporePlatform(MindSporeParameters, MindSporeConstruction):
    """``mindspore.Tensor``, our ``DTensor`` and MindSpore's communication.

    Which of its two kinds it is follows MindSpore's device target at the time it is made.
    """

    name = "mindspore"

    def __new__(cls) -> MindSporePlatform:
        on_cpu = mindspore.get_context("device_target") == "CPU"
        return super().__new__(CpuPlatform if on_cpu else AscendPlatform)


class CpuPlatform(MindSporePlatform, HostCollectives, HostMath):
    """MindSpore on the CPU, with MCCL."""


class AscendPlatform(MindSporePlatform, AscendCollectives, AscendMath):
    """MindSpore on an Ascend NPU, with HCCL."""

"""A device ``npu`` with process groups ``hccl``, in Python: memory and kernels are the CPU's, the rules torch_npu's.

    with simulated_npu.behaving(Behaviour(average="refused")), simulated_npu.recorded() as calls:
        hyper_parallel.clip_grad_norm_(parameters, 1.0)
    assert calls.waits == []

Tensors do not mix with those of the CPU, a group that serves ``npu`` alone refuses them, and what torch_npu or HCCL
refuse raises. Call ``set_up`` once per process, before the first tensor, and ``join`` in a rank of a pool.
What it cannot show: kernels that run later than the host, their order of summation, and speed.
"""

from __future__ import annotations

from tests.torch_backend.simulated_npu.behaviour import HCCL_REDUCES_ON_910, Behaviour, behave, behaving
from tests.torch_backend.simulated_npu.device import join, present, set_up
from tests.torch_backend.simulated_npu.private_format import FRACTAL_NZ, private
from tests.torch_backend.simulated_npu.record import Calls, recorded

__all__ = [
    "FRACTAL_NZ",
    "HCCL_REDUCES_ON_910",
    "Behaviour",
    "Calls",
    "behave",
    "behaving",
    "join",
    "present",
    "private",
    "recorded",
    "set_up",
]

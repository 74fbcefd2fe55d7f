"""What the simulated device allows, after torch_npu's sources and CANN's documentation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

# torch_npu, csrc/distributed/ProcessGroupHCCL.cpp: the dtypes that all-reduce and reduce-scatter take; uint8, bool and
# float64 are mapped to HCCL types, and refused there all the same.
HCCL_REDUCES = frozenset(
    {
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.bfloat16,
    }
)
# CANN, "HcclAllReduce": on the first Atlas training products (Ascend 910) neither int16 nor bfloat16.
HCCL_REDUCES_ON_910 = HCCL_REDUCES - {torch.int16, torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What differs between chips and versions; the default is an Atlas A2 with the strictest choice of the rest.

    ``float64``: a float64 tensor raises (``refused``), a cast to it gives float32 without a word, as ``_to_copy`` in
    torch_npu's ToKernelNpu.cpp does (``cast to float32``; making one raises here, where the real device makes it and
    fails in a kernel), or it is computed, as on CUDA (``computed``).
    ``scalars``: a 0-d tensor of the device beside a 16-bit one is rounded to 16 bits before they are multiplied, as on
    CUDA (aten/src/ATen/native/cuda/Loops.cuh, `opmath_symmetric_gpu_kernel_with_scalars`), or it is not, as on the CPU;
    what aclnnInplaceMul does is not documented.
    ``average``: HCCL has no AVG, so torch_npu makes it a sum and a division (``getHcclReduceOp``), or nobody does.
    ``maximum_keeps_nan``: NCCL and gloo drop NaN in MAX and MIN; what HCCL does is not documented.
    ``reduced``: the dtypes that collectives reduce.
    ``foreach_takes_private``: torch_npu has its foreach kernels in aclnn alone, which refuses private formats.
    ``private_views``: a view of a tensor in a private format is a copy in the plain one, so that what is written to it
    is lost (torch_npu, ``as_strided``), or it takes the memory for what it is not.
    """

    float64: Literal["refused", "cast to float32", "computed"] = "refused"
    scalars: Literal["rounded", "in full"] = "rounded"
    average: Literal["sum and division", "refused"] = "sum and division"
    maximum_keeps_nan: bool = False
    reduced: frozenset[torch.dtype] = HCCL_REDUCES
    foreach_takes_private: bool = False
    private_views: Literal["copies", "memory"] = "copies"


_current = Behaviour()


def current() -> Behaviour:
    """The behaviour in force."""
    return _current


def behave(behaviour: Behaviour) -> None:
    """Behave like this from now on."""
    global _current
    _current = behaviour


@contextmanager
def behaving(behaviour: Behaviour) -> Iterator[None]:
    """Behave like this while the context lasts."""
    before = _current
    behave(behaviour)
    try:
        yield
    finally:
        behave(before)

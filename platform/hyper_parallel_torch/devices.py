"""What devices can do, and how numbers get there. What holds for one kind of device stands here, with its source.

The rules are tables, not attempts: on Ascend 910 a float64 kernel is accepted and fails on the device later, where it
is blamed on another call.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _device_has_foreach_support

# Kinds of devices that compute float64 and whose libraries reduce it; on some xpu devices it depends on the model.
# Not npu: a cast gives float32 instead (torch_npu, csrc/aten/common/ToKernelNpu.cpp, `_to_copy`), and all-reduce and
# reduce-scatter refuse it (torch_npu, csrc/distributed/ProcessGroupHCCL.cpp, `checkSupportedDataType`; CANN,
# "HcclAllReduce": int8 to int64, float16, float32, from Atlas A2 on bfloat16). Not mps: it has none.
_FLOAT64: dict[str, Callable[[torch.device], bool]] = {
    "cpu": lambda device: True,
    "cuda": lambda device: True,
    "xpu": lambda device: bool(torch.xpu.get_device_properties(device).has_fp64),
}

# Formats whose memory holds the elements in order: NCHW, NHWC, ND and NCDHW (torch_npu, csrc/framework/FormatHelper.cpp,
# `IsOpInputBaseFormat`).
_PLAIN_FORMATS = (0, 1, 2, 30)
# The plain format that a private one is cast to: NC1HWC0 and FRACTAL_Z come from NCHW, NDHWC, NDC1HWC0 and FRACTAL_Z_3D
# from NCDHW, and others, such as FRACTAL_NZ, from ND (the same file, `InitializeInfo`).
_PLAIN_OF = {3: 0, 4: 0, 27: 30, 32: 30, 33: 30}
_ND = 2

# Said wherever a tensor is made, as ``torch.set_default_device`` may say otherwise.
_CPU = torch.device("cpu")


@lru_cache(maxsize=256)
def widest_float(device: torch.device, others: tuple[str, ...] = ()) -> torch.dtype:
    """The widest float that the device, and ``others`` where numbers may meet, compute and their collectives reduce."""
    kinds = (device, *map(torch.device, others))
    return torch.float64 if all(map(_has_float64, kinds)) else torch.float32


def _has_float64(device: torch.device) -> bool:
    return device.type in _FLOAT64 and _FLOAT64[device.type](device)


def check_foreach(device: torch.device, foreach: bool | None) -> None:
    """Raise if foreach kernels are asked for and torch has none for the device."""
    if foreach and not has_foreach(device):
        raise RuntimeError(f"foreach=True was passed, but {device.type} tensors have no foreach kernels")


def has_foreach(device: torch.device) -> bool:
    """Whether torch takes foreach kernels there by itself; torch_npu, as a PrivateUse1 device, is among them."""
    return _device_has_foreach_support(device)


# ---- private formats


def by_format(tensors: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors whose memory holds their elements in order, and those in a private format of torch_npu (FRACTAL_NZ).

    Of the latter a view may be a copy, so that writing to it is lost (torch_npu, csrc/aten/common/TensorShape.cpp,
    `as_strided`), storage may be larger than the tensor, and foreach kernels raise "do not support internal format"
    (torch_npu, gen_backend_stubs.py, which writes that check before kernels that aclnn alone has; foreach kernels are
    among them, CANN, "aclnnForeachNorm": format ND). Without torch_npu there are none. On Atlas A3 they are off unless
    ``torch.npu.config.allow_internal_format`` is set; elsewhere they are on.
    """
    torch_npu = sys.modules.get("torch_npu")
    if torch_npu is None:
        return list(tensors), []
    in_order: list[Tensor] = []
    private: list[Tensor] = []
    for tensor in tensors:
        is_plain = tensor.device.type != "npu" or torch_npu.get_npu_format(tensor) in _PLAIN_FORMATS
        (in_order if is_plain else private).append(tensor)
    return in_order, private


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy in order of one in a private format."""
    if not by_format([tensor])[1]:
        return tensor
    torch_npu: Any = sys.modules["torch_npu"]
    copy: Tensor = torch_npu.npu_format_cast(tensor, _PLAIN_OF.get(torch_npu.get_npu_format(tensor), _ND))
    return copy


# ---- numbers of the host
#
# A copy from the host makes it wait for all that the device has still to do: a blocking one by torch's design (CUDA:
# aten/src/ATen/native/cuda/Copy.cu; torch_npu: csrc/aten/common/CopyKernel.cpp, `copy_between_host_and_device`), and on
# Ascend any one from memory that is not page-locked (CANN, "aclrtMemcpyAsync"). So a number goes along with a kernel
# that fills, and what is the same in every step is copied once.


def filled(number: float, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """A 0-d tensor, without a copy from the host."""
    return torch.full((), number, dtype=dtype, device=device or _CPU)


def moved(scalar: Tensor, device: torch.device) -> Tensor:
    """A 0-d tensor on the device, float64 in the widest float that it has."""
    if scalar.device == device:
        return scalar
    dtype = widest_float(device) if scalar.dtype == torch.float64 else scalar.dtype
    if scalar.device.type == "cpu":
        return filled(scalar.item(), dtype, device)
    return scalar.to(dtype).to(device)


def unrounded(factor: Tensor, tensor: Tensor) -> Tensor:
    """A 0-d float32 factor, in the form in which a product with the tensor is rounded once.

    Beside a 16-bit tensor a 0-d factor has no say in the dtype. On the CPU it is float32 all the same, while on an
    accelerator it may be rounded to 16 bits first (CUDA: aten/src/ATen/native/cuda/Loops.cuh,
    `opmath_symmetric_gpu_kernel_with_scalars`); one of as many dims as the tensor makes the product float32.
    """
    return factor if factor.is_cpu else factor.view((1,) * tensor.ndim)


def numbers(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new 1-d tensor, copied from the host only if these values are new there."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype, device=device)
    return _kept(array("d", values).tobytes(), dtype, device).clone()


@lru_cache(maxsize=32)
def _kept(values: bytes, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Bytes, as 0.0 and -0.0 are equal and NaN is not.
    return torch.tensor(array("d", values), dtype=dtype, device=_CPU).to(device)

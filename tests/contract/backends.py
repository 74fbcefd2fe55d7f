"""How the contract suite builds and reads tensors of each backend; the frameworks are imported on use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np


def rounded(values: Any, dtype: str) -> np.ndarray:
    """Float64 values as ``dtype`` would hold them (bfloat16: to the nearest, ties to even), again in float64."""
    array = np.asarray(values, np.float64)
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return array.astype(dtype).astype(np.float64)
        bits = np.ascontiguousarray(array, np.float32).reshape(array.shape).view(np.uint32)
        up = (bits >> np.uint32(16) & np.uint32(1)) + np.uint32(0x7FFF)
        nearest = ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return np.where(np.isfinite(array), nearest, array)


class Kit:
    """What the tests need of a framework beside its platform; this base is NumPy's."""

    name = "numpy"
    platform = "numpy"
    device_type = "cpu"
    dtypes: tuple[str, ...] = ("float16", "float32", "float64")
    has_foreach = False

    @property
    def has_float64(self) -> bool:
        """Whether the device has it, so that statistics are taken in it."""
        return "float64" in self.dtypes

    def device(self) -> AbstractContextManager[None]:
        """While this lasts, tensors can be made."""
        return nullcontext()

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        """A new tensor of the framework."""
        from tests.contract.numpy_platform import Tensor

        return np.array(rounded(values, dtype), dtype).view(Tensor)

    def parameter(self, values: Any, dtype: str = "float32", requires_grad: bool = True) -> Any:
        """A new parameter without a gradient."""
        from tests.contract.numpy_platform import Parameter

        return Parameter(self.tensor(values, dtype), requires_grad=requires_grad)

    def module(self, parameters: Mapping[str, Any]) -> Any:
        """A module or cell of these parameters."""
        return dict(parameters)

    def set_grad(self, parameter: Any, gradient: Any) -> None:
        parameter.grad = gradient

    def array(self, tensor: Any) -> np.ndarray:
        """A copy of the values, in float64."""
        return np.array(tensor, np.float64)

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype)

    def dtype_object(self, dtype: str) -> Any:
        return np.dtype(dtype)

    def transposed(self, tensor: Any) -> Any:
        """A view of the same memory with reversed dims."""
        return tensor.T

    def expanded(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        """A view of the tensor repeated to ``shape``, whose elements share memory."""
        return np.broadcast_to(tensor, shape)

    def graded(self, values: Any, dtype: str = "float32", gradient_dtype: str | None = None) -> Any:
        """A parameter of ones whose gradient holds ``values``."""
        parameter = self.parameter(np.ones(np.shape(values)), dtype)
        self.set_grad(parameter, self.tensor(values, gradient_dtype or dtype))
        return parameter


class TorchKit(Kit):
    """PyTorch on the CPU."""

    name = "torch"
    platform = "torch"
    dtypes = ("float16", "bfloat16", "float32", "float64")
    has_foreach = True

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        import torch

        return torch.tensor(rounded(values, dtype)).to(getattr(torch, dtype))

    def parameter(self, values: Any, dtype: str = "float32", requires_grad: bool = True) -> Any:
        import torch

        return torch.nn.Parameter(self.tensor(values, dtype), requires_grad=requires_grad)

    def module(self, parameters: Mapping[str, Any]) -> Any:
        import torch

        module = torch.nn.Module()
        for name, parameter in parameters.items():
            module.register_parameter(name, parameter)
        return module

    def set_grad(self, parameter: Any, gradient: Any) -> None:
        if gradient is not None and gradient.dtype != parameter.dtype:
            parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient

    def array(self, tensor: Any) -> np.ndarray:
        return tensor.detach().double().numpy().copy()

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def dtype_object(self, dtype: str) -> Any:
        import torch

        return getattr(torch, dtype)

    def transposed(self, tensor: Any) -> Any:
        return tensor.permute(*reversed(range(tensor.ndim)))

    def expanded(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        return tensor.expand(shape)


class NpuKit(TorchKit):
    """PyTorch on a simulated NPU, which has no float64."""

    name = "npu"
    device_type = "npu"
    dtypes = ("float16", "bfloat16", "float32")

    def device(self) -> AbstractContextManager[None]:
        from tests.torch_backend import simulated_npu

        return simulated_npu.present()

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        return super().tensor(values, dtype).to("npu")

    def array(self, tensor: Any) -> np.ndarray:
        return super().array(tensor.detach().cpu())


class MindSporeKit(Kit):
    """MindSpore in PyNative mode on the CPU."""

    name = "mindspore"
    platform = "mindspore"
    dtypes = ("float16", "bfloat16", "float32", "float64")

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        import mindspore

        whole = np.asarray(rounded(values, dtype))
        if dtype == "bfloat16":
            return mindspore.Tensor(whole.astype(np.float32)).astype(mindspore.bfloat16)
        return mindspore.Tensor(whole.astype(dtype))

    def parameter(self, values: Any, dtype: str = "float32", requires_grad: bool = True) -> Any:
        import mindspore

        return mindspore.Parameter(self.tensor(values, dtype), requires_grad=requires_grad)

    def module(self, parameters: Mapping[str, Any]) -> Any:
        import mindspore

        cell = mindspore.nn.Cell()
        for name, parameter in parameters.items():
            parameter.name = name
            cell.insert_param_to_cell(name, parameter)
        return cell

    def array(self, tensor: Any) -> np.ndarray:
        return np.array(
            tensor.float().asnumpy() if self.dtype(tensor) == "bfloat16" else tensor.asnumpy(), np.float64
        )

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).lower()

    def dtype_object(self, dtype: str) -> Any:
        import mindspore

        return getattr(mindspore, dtype)

    def transposed(self, tensor: Any) -> Any:
        return tensor.permute(*reversed(range(tensor.ndim)))

    def expanded(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        return tensor.broadcast_to(shape)


KITS: dict[str, Callable[[], Kit]] = {
    "numpy": Kit,
    "torch": TorchKit,
    "npu": NpuKit,
    "mindspore": MindSporeKit,
}
_NAMED = tuple(filter(None, os.environ.get("HYPER_PARALLEL_TEST_BACKENDS", "torch,mindspore").split(",")))
BACKENDS = ("numpy", *_NAMED, *(["npu"] if "torch" in _NAMED else []))
"""What the suite runs on. A backend that is named and missing is an error, not a skip."""

"""FRACTAL_NZ, and the module ``torch_npu`` that tells of it.

Blocks of 16 x 16 elements, column of blocks by column of blocks, each by rows, with zeros where the matrix ends: memory is neither as
large as the tensor nor in its order. A view of such a tensor is a copy in the plain format (``as_strided`` in torch_npu's StridedKernel
warns of it), so what is written to the view is lost.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import torch

from tests.torch_backend.simulated_npu.tensor import ND, NpuTensor

FRACTAL_NZ = 29
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Blocks:
    """The memory of a tensor in FRACTAL_NZ."""

    memory: torch.Tensor

    def pack(self, matrix: torch.Tensor) -> None:
        rows, columns = _padded(matrix.shape)
        whole = torch.zeros(rows, columns, dtype=matrix.dtype)
        whole[: matrix.shape[0], : matrix.shape[1]] = matrix
        self.memory.copy_(whole.view(rows, -1, _BLOCK).transpose(0, 1).reshape(-1))

    def unpacked(self, shape: torch.Size) -> torch.Tensor:
        rows, columns = _padded(shape)
        whole = self.memory.view(columns // _BLOCK, rows, _BLOCK).transpose(0, 1).reshape(rows, columns)
        return whole[: shape[0], : shape[1]].contiguous()


def private(tensor: torch.Tensor, memory: torch.Tensor | None = None) -> NpuTensor:
    """A matrix of the simulated device in FRACTAL_NZ, in ``memory`` (of the CPU) if that is given."""
    assert isinstance(tensor, NpuTensor)
    assert tensor.ndim == 2
    rows, columns = _padded(tensor.shape)
    blocks = Blocks(torch.empty(rows * columns, dtype=tensor.dtype) if memory is None else memory)
    blocks.pack(tensor.raw)
    # The shape, strides and dtype of the plain tensor, whose values nobody reads.
    return NpuTensor(torch.full_like(tensor.raw, torch.nan).contiguous(), tensor.index, FRACTAL_NZ, blocks)


def torch_npu() -> ModuleType:
    """The part of the module that tells and changes formats."""
    module = ModuleType("torch_npu")
    module.get_npu_format = lambda tensor: tensor.npu_format  # type: ignore[attr-defined]
    module.npu_format_cast = _cast  # type: ignore[attr-defined]
    return module


def install() -> None:
    sys.modules["torch_npu"] = torch_npu()


def remove() -> None:
    sys.modules.pop("torch_npu", None)


def _cast(tensor: NpuTensor, npu_format: int) -> NpuTensor:
    if tensor.npu_format == npu_format:
        return tensor
    return private(tensor) if npu_format == FRACTAL_NZ else NpuTensor(tensor.plain(), tensor.index, ND)


def _padded(shape: torch.Size) -> tuple[int, int]:
    rows, columns = (-(-size // _BLOCK) * _BLOCK for size in shape)
    return rows, columns

"""The PyTorch platform, put together from its four roles."""

from __future__ import annotations

from hyper_parallel_torch.collectives import TorchCollectives
from hyper_parallel_torch.construction import TorchConstruction
from hyper_parallel_torch.parameters import TorchParameters
from hyper_parallel_torch.tensor_math import TorchMath


class TorchPlatform(TorchParameters, TorchCollectives, TorchMath, TorchConstruction):
    """``torch.Tensor``, ``torch.distributed.tensor.DTensor`` and ``torch.distributed`` on any device."""

    name = "torch"

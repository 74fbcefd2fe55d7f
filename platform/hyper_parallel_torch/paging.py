"""Large buffers on the CPU that go back to the system when they die.

From the heap they would not: small tensors that outlive a buffer settle in the gap it leaves, the next one no longer
fits, and the process grows by a buffer each time (by 500 MB for 1 GB of Partial gradients).
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_LARGE = 2**20


def paged(numel: int, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    """An uninitialised 1-d tensor."""
    size = numel * dtype.itemsize
    if size < _LARGE or (device is not None and device.type != "cpu"):
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype)

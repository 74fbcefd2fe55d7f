"""The cases of ``beside_torch``: parameters with gradients on each rank, and the norm that NumPy gives in float64.

A case builds ``(parameters, options)``; the options go to ``hyper_parallel`` only, and say what the objects themselves
cannot (a pipeline, a layout of plain tensors). Torch's function has no such options.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import hyper_parallel

Values = list[np.ndarray]
Built = tuple[list[Tensor], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """``whole`` gives the unsharded gradients as stored, ``build`` this rank's parameters.

    ``tolerance`` is that of the norm after clipping; ``seconds`` is added to the time a rank is given.
    """

    name: str
    ranks: int
    whole: Callable[[], Values]
    build: Callable[[Values], Built]
    p: float = 2.0
    max_norm: float = 1.0
    tolerance: float = 1e-5
    seconds: float = 0.0

    def expected(self) -> float:
        return norm_of(self.whole(), self.p)


def norm_of(arrays: list[np.ndarray], p: float) -> float:
    """In float64, a million elements at a time."""
    powers, largest = [], [0.0]
    for array in arrays:
        flat = array.reshape(-1)
        for start in range(0, flat.size, 1 << 20):
            values = np.abs(flat[start : start + (1 << 20)].astype(np.float64))
            largest.append(float(values.max()))
            powers.append(float(np.count_nonzero(values) if p == 0 else (values ** min(p, 9)).sum()))
    if math.isinf(p):
        return float(np.max(largest))
    return math.fsum(powers) if p == 0 else math.fsum(powers) ** (1 / p)


def run(name: str, function: str) -> dict[str, Any]:
    """Clip on this rank; ``after`` is the norm of the clipped elements that no rank before this one holds."""
    case = CASES[name]
    whole = case.whole()
    parameters, options = case.build(whole)
    shared = [_first_holder(parameter) for parameter in parameters]
    try:
        if function == "torch":
            norm = torch.nn.utils.clip_grad_norm_(parameters, case.max_norm, case.p)
        else:
            norm = hyper_parallel.clip_grad_norm_(parameters, case.max_norm, case.p, **options)
        value = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
        if dist.get_world_size() > 1 and "gloo" not in str(error):
            _let_others_finish()
        return {"error": f"{type(error).__name__}: {error}"}
    own = [
        _local(p.grad).float().numpy()
        for p, mine in zip(parameters, shared, strict=True)
        if mine and p.grad is not None
    ]
    return {"norm": value, "expected": case.expected(), "after": norm_of(own, case.p)}


def _let_others_finish() -> None:
    """A rank that raised says so only to the pool; the others show by themselves whether they wait for it."""


def _first_holder(parameter: Tensor) -> bool:
    """Whether this rank counts its local gradient: no rank before it holds the same elements."""
    gradient = parameter.grad
    layout = getattr(parameter, "hyper_parallel_layout", None)
    if isinstance(gradient, DTensor):
        coordinate = gradient.device_mesh.get_coordinate()
        placements = gradient.placements
        outside = [r for r in range(dist.get_rank()) if r not in gradient.device_mesh.mesh.flatten().tolist()]
        first = all(p.is_shard() or c == 0 for p, c in zip(placements, coordinate, strict=True))
        return first and not (outside and gradient.device_mesh.ndim == 1 and _root_first(gradient))
    return layout is not None or getattr(parameter, "stage", False) or dist.get_rank() == 0


def _root_first(gradient: DTensor) -> bool:
    """Whether a sister mesh with lower ranks holds the same elements."""
    return min(gradient.device_mesh.mesh.flatten().tolist()) > 0


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

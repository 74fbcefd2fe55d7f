"""Our call and torch's own on the same sharded gradients; runs on every rank of a pool."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

import hyper_parallel
from tests.torch_backend import models


def both(strategy: str, norm_types: tuple[float, ...]) -> list[dict[str, Any]]:
    """For each norm type the two norms, and whether norms and gradients have the same bits."""
    model = models.trained(strategy)
    parameters = list(model.parameters())
    saved = [_local(parameter.grad).clone() for parameter in parameters]
    found = []
    for p in norm_types:
        results = []
        for call in (hyper_parallel.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
            for parameter, values in zip(parameters, saved, strict=True):
                _local(parameter.grad).copy_(values)
            norm = call(parameters, 0.1, p)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            results.append((norm, [_local(parameter.grad).clone() for parameter in parameters]))
        (ours, our_gradients), (theirs, their_gradients) = results
        same = all(map(torch.equal, our_gradients, their_gradients))
        found.append({"norms": (ours.item(), theirs.item()), "gradients": same})
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

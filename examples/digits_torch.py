"""One rank of the training in PyTorch: FSDP2 on a mesh of replicas x shards.

``fully_shard`` leaves each rank with its rows of every parameter and averages the gradients over all ranks;
``clip_grad_norm_`` reads the placements off the parameters.
"""

from __future__ import annotations

import torch
from digits_data import MESH_DIM_NAMES, Images, Settings, initial_weights
from torch import nn
from torch.distributed.fsdp import fully_shard

import hyper_parallel


class TorchTrainer:
    """A ``Trainer`` on PyTorch."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.rank = torch.distributed.get_rank()
        mesh = hyper_parallel.init_device_mesh("cpu", settings.mesh_shape, mesh_dim_names=MESH_DIM_NAMES)
        self._model = _model(settings.seed)
        for layer in self._model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=settings.learning_rate, momentum=settings.momentum
        )

    def step(self, share: Images) -> tuple[float, float]:
        logits = self._model(torch.from_numpy(share.pixels))
        labels = torch.from_numpy(share.labels).long()
        # FSDP2 averages over ranks. Weighted like this, shares of unequal size give the batch's mean all the same.
        weight = self._settings.world_size / self._settings.batch_size
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") * weight
        self._optimizer.zero_grad()
        loss.backward()
        total_norm = hyper_parallel.clip_grad_norm_(self._model, self._settings.max_norm)
        self._optimizer.step()
        return loss.item(), total_norm.item()

    @torch.no_grad()
    def count_correct(self, share: Images) -> int:
        logits = self._model(torch.from_numpy(share.pixels))
        return int((logits.argmax(dim=1) == torch.from_numpy(share.labels)).sum())


def _model(seed: int) -> nn.Sequential:
    model = nn.Sequential()
    for weight, bias in initial_weights(seed):
        if model:
            model.append(nn.Tanh())
        outputs, inputs = weight.shape
        linear = nn.Linear(inputs, outputs)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weight))
            linear.bias.copy_(torch.from_numpy(bias))
        model.append(linear)
    return model

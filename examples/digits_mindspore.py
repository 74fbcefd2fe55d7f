"""One rank of the training in MindSpore: ZeRO-style sharding on a mesh of replicas x shards, written by hand.

Every rank computes with all weights but trains only its rows of each, which have their layout attached: the
gradients are averaged over all ranks, each rank clips its rows of them and updates its rows of the weights, and
all ranks gather the new weights. On the CPU, MindSpore has no reduce-scatter and gathers parts of one size
only; hence an all-reduce that is then cut, and parts that are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

import mindspore
from digits_data import MESH_DIM_NAMES, Images, Settings, initial_weights
from mindspore import Parameter, Tensor, mint, nn, ops

import hyper_parallel
from hyper_parallel import Layout, Replicate, Shard

PLACEMENTS = (Replicate(), Shard(0))
"""Of every parameter, along the mesh dims "replicate" and "shard"."""


class MindSporeTrainer:
    """A ``Trainer`` on MindSpore."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.rank = mint.distributed.get_rank()
        self._model = _model(settings.seed)
        self._weights = self._model.trainable_params()
        self._mesh = hyper_parallel.init_device_mesh(
            "CPU", settings.mesh_shape, mesh_dim_names=MESH_DIM_NAMES
        )
        self._layouts = [Layout(self._mesh.core, PLACEMENTS, tuple(weight.shape)) for weight in self._weights]
        self._shards = [self._shard(*pair) for pair in zip(self._weights, self._layouts, strict=True)]
        # MindSpore's optimizers refuse parameters without elements, and the last ranks of many may have no rows.
        trained = [shard for shard in self._shards if shard.size]
        self._optimizer = nn.Momentum(trained, settings.learning_rate, settings.momentum)
        self._loss_and_grads = mindspore.value_and_grad(self._loss, None, self._weights)

    def step(self, share: Images) -> tuple[float, float]:
        loss, grads = self._loss_and_grads(Tensor(share.pixels), Tensor(share.labels))
        grads = self._reduce_scatter(grads)
        total_norm = hyper_parallel.clip_grad_norm_(self._shards, self._settings.max_norm, grads=grads)
        self._optimizer(tuple(grad for grad in grads if grad.size))
        self._all_gather()
        return float(loss.asnumpy()), float(total_norm.asnumpy())

    def count_correct(self, share: Images) -> int:
        logits = self._model(Tensor(share.pixels)).asnumpy()
        return int((logits.argmax(axis=1) == share.labels).sum())

    def _loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        # The gradients are averaged over ranks. Weighted like this, shares of unequal size give the batch's mean.
        weight = self._settings.world_size / self._settings.batch_size
        return ops.cross_entropy(self._model(pixels), labels, reduction="sum") * weight

    def _reduce_scatter(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The mean over all ranks of this rank's rows of every gradient; one all-reduce."""
        flat = mint.cat([grad.reshape(-1) for grad in grads])
        mint.distributed.all_reduce(flat)
        starts = accumulate((grad.size for grad in grads), initial=0)
        cut = []
        for start, layout in zip(starts, self._layouts, strict=False):
            rows = _rows(layout, self.rank)
            width = prod(layout.global_shape[1:])
            part = flat[start + rows.start * width : start + rows.stop * width]
            # The division also makes a tensor of its own of the view: only such a one can be scaled in place.
            cut.append((part / self._settings.world_size).reshape(layout.local_shape(self.rank)))
        return tuple(cut)

    def _all_gather(self) -> None:
        """Put the rows of all shards together again as the weights to compute with; one all-gather."""
        ranks = self._mesh.core.slice_ranks(self.rank, (MESH_DIM_NAMES.index("shard"),))
        sizes = {rank: [prod(layout.local_shape(rank)) for layout in self._layouts] for rank in ranks}
        length = max(map(sum, sizes.values()))
        padding = mint.zeros(length - sum(sizes[self.rank]))
        mine = mint.cat([shard.reshape(-1) for shard in (*self._shards, padding) if shard.size])
        gathered = [mint.zeros(length) for _ in ranks]
        mint.distributed.all_gather(gathered, mine, self._mesh.get_group("shard"))
        parts = [
            mint.split(flat[: sum(sizes[rank])], sizes[rank])
            for rank, flat in zip(ranks, gathered, strict=True)
        ]
        for weight, rows in zip(self._weights, zip(*parts, strict=True), strict=True):
            weight.set_data(mint.cat([part for part in rows if part.size]).reshape(weight.shape))

    def _shard(self, weight: Parameter, layout: Layout) -> Parameter:
        rows = Tensor(weight.asnumpy()[_rows(layout, self.rank)].copy())
        return hyper_parallel.attach_layout(
            Parameter(rows, name=weight.name), self._mesh, PLACEMENTS, weight.shape
        )


def _rows(layout: Layout, rank: int) -> slice:
    """Where this rank's rows lie in the whole; at most one area, since one mesh dim shards."""
    areas = layout.areas(rank)
    return slice(areas[0].offsets[0], areas[0].offsets[0] + areas[0].sizes[0]) if areas else slice(0, 0)


def _model(seed: int) -> nn.SequentialCell:
    model = nn.SequentialCell()
    for weight, bias in initial_weights(seed):
        if len(model):
            model.append(nn.Tanh())
        outputs, inputs = weight.shape
        model.append(nn.Dense(inputs, outputs, weight_init=Tensor(weight), bias_init=Tensor(bias)))
    return model

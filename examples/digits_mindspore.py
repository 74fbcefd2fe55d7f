"""One rank of the training in MindSpore: ZeRO-style sharding on a mesh of replicas x shards, written by hand.

Every rank computes with all weights but trains only its rows of each, which have their layout attached: the
gradients are averaged over all ranks, each rank clips its rows of them and updates its rows of the weights, and
all ranks gather the new weights. On the CPU, MindSpore has no reduce-scatter and gathers parts of one size
only; hence an all-reduce that is then cut, and parts that are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from math import prod

import mindspore
from digits_data import LAYER_SIZES, MESH_DIM_NAMES, Images, Settings, initial_weights
from mindspore import Parameter, Tensor, mint, nn, ops

import hyper_parallel
from hyper_parallel import Layout, Mesh, Replicate, Shard


class MindSporeTrainer:
    """A ``Trainer`` on MindSpore."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.rank = mint.distributed.get_rank()
        self._model = _model(settings.seed)
        self._weights = self._model.trainable_params()
        mesh = Mesh(settings.mesh_shape, tuple(range(settings.world_size)), MESH_DIM_NAMES)
        self._layouts = [
            Layout(mesh, (Replicate(), Shard(0)), tuple(weight.shape)) for weight in self._weights
        ]
        self._shards = [
            _shard(weight, layout, self.rank)
            for weight, layout in zip(self._weights, self._layouts, strict=True)
        ]
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
        """Put the rows of all ranks together again as the weights to compute with; one all-gather."""
        mesh = self._layouts[0].mesh
        length = max(sum(prod(layout.local_shape(rank)) for layout in self._layouts) for rank in mesh.ranks)
        mine = mint.cat([shard.reshape(-1) for shard in self._shards])
        mine = mint.cat([mine, mint.zeros(length - mine.size)]) if mine.size < length else mine
        gathered = [mint.zeros(length) for _ in mesh.ranks]
        mint.distributed.all_gather(gathered, mine)
        # The other replicas hold the same rows once more.
        replica = mesh.slice_ranks(0, (MESH_DIM_NAMES.index("shard"),))
        starts = dict.fromkeys(replica, 0)
        for weight, layout in zip(self._weights, self._layouts, strict=True):
            parts = []
            for rank in replica:
                stop = starts[rank] + prod(layout.local_shape(rank))
                parts.append(gathered[rank][starts[rank] : stop])
                starts[rank] = stop
            weight.set_data(mint.cat(parts).reshape(layout.global_shape))


def _rows(layout: Layout, rank: int) -> slice:
    areas = layout.areas(rank)
    return slice(areas[0].offsets[0], areas[0].offsets[0] + areas[0].sizes[0]) if areas else slice(0, 0)


def _shard(weight: Parameter, layout: Layout, rank: int) -> Parameter:
    rows = Tensor(weight.asnumpy()[_rows(layout, rank)].copy())
    shard = Parameter(rows, name=weight.name)
    return hyper_parallel.attach_layout(shard, layout.mesh, layout.placements, layout.global_shape)


def _model(seed: int) -> nn.SequentialCell:
    linears = [
        nn.Dense(*reversed(weight.shape), weight_init=Tensor(weight), bias_init=Tensor(bias))
        for weight, bias in initial_weights(seed)
    ]
    activations = [nn.Tanh() for _ in LAYER_SIZES[1:]]
    return nn.SequentialCell(list(chain.from_iterable(zip(linears, activations, strict=True)))[:-1])

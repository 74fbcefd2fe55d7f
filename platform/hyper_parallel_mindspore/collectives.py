"""Collectives over ranks, by the groups that MindSpore names."""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, mint

from hyper_parallel_mindspore import process_groups
from hyper_parallel_mindspore.numbers64 import Numbers, decode, encode
from hyper_parallel_mindspore.process_groups import ProcessGroups, group_name


class MindSporeCollectives:
    """The ``Collectives`` role of the platform: MCCL for numbers on the host, HCCL for tensors on an Ascend NPU.

    What concerns an NPU was not run on one.
    """

    def __init__(self) -> None:
        self.process_groups = ProcessGroups()

    def rank(self) -> int:
        return process_groups.rank()

    def groups(self) -> frozenset[tuple[int, ...]]:
        return self.process_groups.known()

    def all_reduce(self, buffer: Any, reduce_op: str, ranks: tuple[int, ...]) -> Any:
        group = group_name(ranks)
        if not isinstance(buffer, Numbers):
            mint.distributed.all_reduce(buffer, reduce_op, group)
            return buffer
        integers = Tensor(encode(buffer, reduce_op))
        mint.distributed.all_reduce(integers, reduce_op, group)
        return decode(np.asarray(integers.asnumpy()), reduce_op)

    def reduce_scatter(self, buffer: Any, reduce_op: str, ranks: tuple[int, ...]) -> Any:
        """Reduce in float32. MCCL has no reduce-scatter, so there everything is reduced and a slice kept."""
        group, position, size = group_name(ranks), ranks.index(self.rank()), len(buffer) // len(ranks)
        if not isinstance(buffer, Numbers):
            output = mint.zeros(size, dtype=buffer.dtype)
            mint.distributed.reduce_scatter_tensor(output, buffer, reduce_op, group)
            return output
        whole = Tensor(np.asarray(buffer))
        mint.distributed.all_reduce(whole, reduce_op, group)
        return np.asarray(whole.asnumpy())[position * size : (position + 1) * size].view(Numbers)

    def all_gather_object(self, value: Any, ranks: tuple[int, ...]) -> list[Any]:
        gathered: list[Any] = [None] * len(ranks)
        mint.distributed.all_gather_object(gathered, value, group_name(ranks))
        return gathered

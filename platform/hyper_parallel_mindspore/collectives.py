"""Collectives over ranks, by the groups that MindSpore names: MCCL on the host, HCCL between Ascend NPUs.

What is reduced on an NPU is float32 and by sum, max or min, which every generation of NPU knows: HCCL has no
average, no float64 before Ascend 950, and bfloat16 from Atlas A2 on (CANN, HcclAllReduce). Unless it is told to be
deterministic (HCCL_DETERMINISTIC), its sums may differ in the last bit from run to run. Nothing was run on an NPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import Tensor, mint

from hyper_parallel_mindspore import process_groups
from hyper_parallel_mindspore.numbers64 import Numbers, decode, encode
from hyper_parallel_mindspore.process_groups import ProcessGroups, group_name


class MindSporeCollectives:
    """The part of the ``Collectives`` role that does not depend on the device."""

    def __init__(self) -> None:
        self.process_groups = ProcessGroups()

    def rank(self) -> int:
        return process_groups.rank()

    def groups(self) -> frozenset[tuple[int, ...]]:
        return self.process_groups.known()

    def all_gather_object(self, value: Any, ranks: tuple[int, ...]) -> list[Any]:
        gathered: list[Any] = [None] * len(ranks)
        mint.distributed.all_gather_object(gathered, value, group_name(ranks))
        return gathered


class HostCollectives(MindSporeCollectives):
    """The ``Collectives`` role for numbers on the host."""

    def all_reduce(self, buffer: Numbers, reduce_op: str, ranks: tuple[int, ...]) -> Numbers:
        integers = Tensor(encode(buffer, reduce_op))
        mint.distributed.all_reduce(integers, reduce_op, group_name(ranks))
        return decode(np.asarray(integers.asnumpy()), reduce_op)

    def reduce_scatter(self, buffer: Numbers, reduce_op: str, ranks: tuple[int, ...]) -> Numbers:
        """Reduce everything in float32 and keep a slice, as MCCL has no reduce-scatter."""
        size = len(buffer) // len(ranks)
        start = ranks.index(self.rank()) * size
        whole = Tensor(np.asarray(buffer))
        mint.distributed.all_reduce(whole, reduce_op, group_name(ranks))
        return np.asarray(whole.asnumpy())[start : start + size].view(Numbers)


class AscendCollectives(MindSporeCollectives):
    """The ``Collectives`` role for float32 tensors on an NPU; the host does not wait for the result."""

    def all_reduce(self, buffer: Tensor, reduce_op: str, ranks: tuple[int, ...]) -> Tensor:
        mint.distributed.all_reduce(buffer, reduce_op, group_name(ranks))
        return buffer

    def reduce_scatter(self, buffer: Tensor, reduce_op: str, ranks: tuple[int, ...]) -> Tensor:
        output = mint.zeros(buffer.size // len(ranks), dtype=buffer.dtype)
        mint.distributed.reduce_scatter_tensor(output, buffer, reduce_op, group_name(ranks))
        return output

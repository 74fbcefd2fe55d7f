"""The communication groups of MindSpore, by the sorted ranks in them.

Creating a group concerns its members alone and takes 0.3 ms, so every slice of a mesh may have one. What is needed
is that all members of a slice know it before they plan: each notes all slices of each mesh it meets.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from itertools import combinations
from typing import Any

import mindspore
from mindspore import mint
from mindspore._c_expression import GroupOptions
from mindspore.communication import GlobalComm, create_group

from hyper_parallel.core.mesh import Mesh

# Every HCCL group takes twice HCCL_BUFFSIZE of the NPU's memory, 2 x 200 MB unless told otherwise (CANN, environment
# variable HCCL_BUFFSIZE). The largest message here is a bucket of 16 MB, and a message should fit into the buffer.
_HCCL_BUFFER_MB = 32


def rank() -> int:
    """This process's global rank; 0 without a process group."""
    return int(mint.distributed.get_rank()) if mint.distributed.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return int(mint.distributed.get_world_size()) if mint.distributed.is_initialized() else 1


def group_name(ranks: tuple[int, ...]) -> str:
    """The name of the group of ``ranks``, sorted; the first call creates it, and every member has to make one.

    Raises:
        RuntimeError: no process group is initialised. MindSpore itself would end the process at the first collective.
        ValueError: this rank is not among ``ranks``.
    """
    if not mint.distributed.is_initialized():
        raise RuntimeError(
            f"ranks {ranks} are to communicate, but no process group is initialised: "
            "call mindspore.communication.init('mccl') on the CPU or "
            "mindspore.mint.distributed.init_process_group() on Ascend first"
        )
    if rank() not in ranks:
        raise ValueError(f"rank {rank()} is not among the ranks {ranks} of the group")
    return _created(ranks, world_size())


@cache
def _created(ranks: tuple[int, ...], world: int) -> str:
    if ranks == tuple(range(world)):
        return str(GlobalComm.WORLD_COMM_GROUP)
    # HCCL takes names of less than 128 characters (CANN, HcclCommConfig), which the ranks themselves may exceed.
    name = f"hyper_parallel_{blake2b(repr(ranks).encode(), digest_size=16).hexdigest()}"
    create_group(name, list(ranks), _options())
    return name


def _options() -> Any:
    """How a group is set up. ``GroupOptions`` has no public module; it stands so in ``create_group``'s own docstring."""
    if mindspore.get_context("device_target") != "Ascend":
        return None
    options = GroupOptions()
    options.hccl_config = {"hccl_buffer_size": _HCCL_BUFFER_MB}
    return options


class ProcessGroups:
    """The rank tuples that a group exists for or can be had for at any time, as far as this rank has met them."""

    def __init__(self) -> None:
        self._meshes: set[Mesh] = set()
        self._slices: set[tuple[int, ...]] = set()

    def known(self) -> frozenset[tuple[int, ...]]:
        if not mint.distributed.is_initialized():
            return frozenset()
        world = range(world_size())
        return frozenset({tuple(world), *(ranks for ranks in self._slices if ranks[-1] in world)})

    def note(self, mesh: Mesh) -> None:
        """Note all slices of a mesh and of its root that this rank is in."""
        if not mint.distributed.is_initialized():  # nor is this rank's number known
            return
        for whole in (mesh, mesh.root or mesh):
            if whole in self._meshes or whole.coordinate(here := rank()) is None:
                continue
            self._meshes.add(whole)
            for number in range(1, whole.ndim + 1):
                for mesh_dims in combinations(range(whole.ndim), number):
                    ranks = tuple(sorted(whole.slice_ranks(here, mesh_dims)))
                    if len(ranks) > 1:
                        self._slices.add(ranks)

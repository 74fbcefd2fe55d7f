"""The roll call by which a launcher's ranks are found to be in step, on real ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import hyper_parallel
from hyper_parallel.parity import worker

if TYPE_CHECKING:
    from tests.conftest import Pools

BACKENDS = os.environ.get("HYPER_PARALLEL_TEST_BACKENDS", "torch,mindspore").split(",")


def another_number_on_one(number: int, world_size: int) -> bool:
    return worker.roll_call(number + hyper_parallel.get_platform().rank() // (world_size - 1), world_size)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_in_the_same_call_are_in_step(backend: str, pools: Pools) -> None:
    ranks = pools.get(backend, 2)
    assert ranks.run("hyper_parallel.parity.worker:roll_call", 7, 2) == [True, True]
    assert ranks.run(f"{__name__}:another_number_on_one", 8, 2) == [False, False]
    assert ranks.run("hyper_parallel.parity.worker:roll_call", 9, 2) == [True, True]

"""In this folder the platform of this process is torch, whatever else is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hyper_parallel.parity.pool import RankPool
from hyper_parallel.platforms import ENVIRONMENT_VARIABLE, get_platform
from tests.torch_backend.simulated_npu import Behaviour


@pytest.fixture(scope="module", autouse=True)
def torch_platform() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, "torch")
        get_platform.cache_clear()
        yield
    get_platform.cache_clear()


class NpuRanks:
    """Pools of ranks in groups that serve the simulated NPU alone, by world size."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._stores = tmp_path_factory
        self._pools: dict[int, RankPool] = {}

    def get(self, world_size: int, behaviour: Behaviour | None = None) -> RankPool:
        """A pool whose devices behave like this."""
        behaviour = behaviour or Behaviour()
        joined = world_size in self._pools and not self._pools[world_size].broken
        pool = self._pools.get(world_size) or RankPool("torch", world_size)
        self._pools[world_size] = pool
        if not joined:
            store = str(self._stores.mktemp("group") / "store")
            pool.run("tests.torch_backend.simulated_npu:join", store, "npu:hccl", behaviour)
        else:
            pool.run("tests.torch_backend.simulated_npu:behave", behaviour)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def npu_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NpuRanks]:
    ranks = NpuRanks(tmp_path_factory)
    yield ranks
    ranks.close()

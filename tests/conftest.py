"""What all tests share: which backends to run, and pools of real ranks that live for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hyper_parallel.parity.pool import RankPool

_MAX_POOLS = 5


class Pools:
    """Pools by platform and world size, the least recently used ones closed to bound the memory."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], RankPool] = {}

    def get(self, platform: str, world_size: int) -> RankPool:
        pool = self._open.pop((platform, world_size), None) or RankPool(platform, world_size)
        self._open[platform, world_size] = pool
        while len(self._open) > _MAX_POOLS:
            self._open.pop(next(iter(self._open))).close()
        return pool

    def close(self) -> None:
        for pool in self._open.values():
            pool.close()
        self._open.clear()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()

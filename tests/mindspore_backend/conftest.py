"""MindSpore is the platform of these tests; without it among the named backends they are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from hyper_parallel.platforms import ENVIRONMENT_VARIABLE, get_platform
from tests.named_backends import BACKENDS

if TYPE_CHECKING:
    from tests.conftest import Pools

collect_ignore_glob = [] if "mindspore" in BACKENDS else ["test_*.py"]


@pytest.fixture(scope="module", autouse=True)
def selected() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, "mindspore")
        get_platform.cache_clear()
        yield
    get_platform.cache_clear()


@pytest.fixture
def on_ranks(pools: Pools) -> Callable[..., list[Any]]:
    """Run a function of ``ranks`` on a number of real ranks; one result per rank."""

    def run(world_size: int, name: str, *args: object) -> list[Any]:
        return pools.get("mindspore", world_size).run(
            f"tests.mindspore_backend.ranks:{name}", *args, timeout=90
        )

    return run

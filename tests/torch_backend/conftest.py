"""In this folder the platform of this process is torch, whatever else is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hyper_parallel.platforms import ENVIRONMENT_VARIABLE, get_platform


@pytest.fixture(scope="module", autouse=True)
def torch_platform() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, "torch")
        get_platform.cache_clear()
        yield
    get_platform.cache_clear()

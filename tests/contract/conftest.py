"""The backends under test, and NumPy registered as a third party registers its platform."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_parallel.platforms import ENVIRONMENT_VARIABLE, GROUP, get_platform
from tests.contract.backends import BACKENDS, KITS, Kit
from tests.contract.process_memory import new_processes


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An installed distribution that brings the NumPy platform: nothing but its metadata, on ``sys.path``."""
    site = tmp_path_factory.mktemp("third-party")
    info = site / "numpy_ranks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy-ranks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\nnumpy = tests.contract.numpy_platform:NumpyPlatform\n"
    )
    sys.path.append(str(site))
    yield site
    sys.path.remove(str(site))


def selected(name: str, third_party: Path) -> Iterator[None]:
    """While this runs, ``get_platform`` gives the platform ``name``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, name)
        get_platform.cache_clear()
        yield
    get_platform.cache_clear()


@pytest.fixture(scope="module", params=BACKENDS)
def kit(request: pytest.FixtureRequest, third_party: Path) -> Iterator[Kit]:
    """One backend's way to build tensors; a backend that is named and missing is an error, not a skip."""
    kit = KITS[request.param]()
    with kit.device():
        for _ in selected(kit.platform, third_party):
            get_platform()
            yield kit


@pytest.fixture(scope="module")
def numpy_ranks(third_party: Path) -> Iterator[None]:
    """The NumPy platform is the one that ``hyper_parallel`` calls."""
    with new_processes():
        yield from selected("numpy", third_party)

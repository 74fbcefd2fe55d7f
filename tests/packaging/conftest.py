"""The distribution, built once from this working tree for all packaging tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command to its end and return what it printed; a failure shows its output."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def built(kind: str, source: Path, outdir: Path) -> Path:
    """Build the sdist or the wheel of `source` with the tools of this environment, without network."""
    run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", outdir, source, cwd=outdir)
    (archive,) = outdir.iterdir()
    return archive


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel_from_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    unpacked = tmp_path_factory.mktemp("unpacked")
    run(sys.executable, "-m", "tarfile", "-e", sdist, unpacked, cwd=unpacked)
    (source,) = unpacked.iterdir()
    return built("wheel", source, tmp_path_factory.mktemp("wheel-from-sdist"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An otherwise empty folder that the wheel alone is installed into."""
    target = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", target, wheel)
    run(*command, cwd=target, PIP_DISABLE_PIP_VERSION_CHECK="1")
    return target


@pytest.fixture
def python(tmp_path: Path):
    """Run Python code in a new process whose working directory is empty; returns what it printed."""

    def execute(code: str, *arguments: str | Path, cwd: Path = tmp_path, path: Path | None = None) -> str:
        environment = {} if path is None else {"PYTHONPATH": str(path)}
        return run(sys.executable, "-c", code, *arguments, cwd=cwd, **environment).strip()

    return execute

"""The environment's stamp: written last, absent after a failure, renewed when a requirement changes.

The script runs in a copy of the few files that it reads. A stand-in for pip takes the place of the slow installation.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FILES = ("pyproject.toml", "ci/constraints.txt", "ci/setup.sh")
# Stands in for `python -m pip`: notes the call and ends as the test asks.
PIP = """
import os, pathlib, sys
with open(os.environ["PIP_CALLS"], "a") as calls:
    print(*sys.argv[1:], file=calls)
sys.exit(int(os.environ.get("PIP_EXIT", "0")))
"""


class Checkout:
    """A copy of what ci/setup.sh reads, with a virtual environment whose pip only notes its calls."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls.txt"
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(root / name, folder / name)
        command = [sys.executable, "-m", "venv", "--without-pip", folder / ".venv"]
        subprocess.run(command, check=True, timeout=100)
        (folder / ".venv" / "bin" / "pip").touch(mode=0o755)
        (package,) = folder.glob(".venv/lib/python*/site-packages")
        (package / "pip").mkdir()
        (package / "pip" / "__main__.py").write_text(PIP)

    @property
    def stamp(self) -> Path:
        return self.folder / ".venv" / ".stamp"

    def setup(self, pip_exit: int = 0) -> tuple[int, list[str]]:
        """Run the script; its exit code and the calls of the stand-in that it made."""
        self.calls.write_text("")
        environment = {
            **os.environ,
            "PIP_NO_INDEX": "1",  # for the real pip, that of a new environment
            "PIP_CALLS": str(self.calls),
            "PIP_EXIT": str(pip_exit),
            "PYTHON": sys.executable,
        }
        done = subprocess.run(
            ["bash", "ci/setup.sh"],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            timeout=200,
            check=False,
        )
        return done.returncode, self.calls.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path, root: Path) -> Checkout:
    return Checkout(tmp_path, root)


def test_first_run_installs_and_writes_the_stamp(checkout: Checkout) -> None:
    code, calls = checkout.setup()
    assert code == 0
    assert "--editable" in calls[-1]
    assert checkout.stamp.exists()


def test_second_run_installs_nothing(checkout: Checkout) -> None:
    checkout.setup()
    assert checkout.setup() == (0, [])


@pytest.mark.parametrize("name", FILES)
def test_changed_file_installs_again(name: str, checkout: Checkout) -> None:
    checkout.setup()
    with open(checkout.folder / name, "a") as file:
        file.write("\n# changed\n")
    code, calls = checkout.setup()
    assert code == 0
    assert calls


def test_failed_installation_leaves_no_stamp(checkout: Checkout) -> None:
    checkout.setup()
    (checkout.folder / "pyproject.toml").write_text("changed")
    code, _ = checkout.setup(pip_exit=1)
    assert code != 0
    assert not checkout.stamp.exists()


def test_unfinished_installation_starts_from_an_empty_environment(checkout: Checkout) -> None:
    leftover = checkout.folder / ".venv" / "leftover"
    leftover.touch()
    code, _ = checkout.setup(pip_exit=1)
    assert code != 0
    assert leftover.exists()
    # The new environment has the real pip, which finds no package and fails.
    code, _ = checkout.setup()
    assert code != 0
    assert not leftover.exists()
    assert not checkout.stamp.exists()

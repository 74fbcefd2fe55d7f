"""The version is written in pyproject.toml; everything else says the same."""

import re
from pathlib import Path

VERSION = "0.1.0"


def test_pyproject_has_the_version(root: Path) -> None:
    (version,) = re.findall(r'(?m)^version = "(.+)"$', (root / "pyproject.toml").read_text())
    assert version == VERSION


def test_changelog_has_an_entry_for_the_version(root: Path) -> None:
    assert f"## [{VERSION}]" in (root / "CHANGELOG.md").read_text()


def test_wheel_and_sdist_have_the_version(wheel: Path, sdist: Path) -> None:
    assert wheel.name.split("-")[1] == VERSION
    assert sdist.name == f"hyper_parallel-{VERSION}.tar.gz"


def test_module_has_the_version(python) -> None:
    assert python("import hyper_parallel; print(hyper_parallel.__version__)") == VERSION


def test_installation_has_the_version(python) -> None:
    assert python("import importlib.metadata as m; print(m.version('hyper-parallel'))") == VERSION


def test_installed_wheel_has_the_version(installed: Path, python) -> None:
    code = "import hyper_parallel; print(hyper_parallel.__version__, hyper_parallel.__file__)"
    version, file = python(code, path=installed).split()
    assert version == VERSION
    assert Path(file).is_relative_to(installed)

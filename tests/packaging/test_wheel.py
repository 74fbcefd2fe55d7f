"""What the wheel and the sdist hold, and that the installed wheel works away from the repository."""

import configparser
import email.message
import email.parser
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("hyper_parallel", "hyper_parallel_torch", "hyper_parallel_mindspore")
METADATA = "hyper_parallel-0.1.0.dist-info"
SOURCES = {
    "hyper_parallel": "hyper_parallel",
    "hyper_parallel_torch": "platform/hyper_parallel_torch",
    "hyper_parallel_mindspore": "platform/hyper_parallel_mindspore",
}


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def text(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name).decode()


def metadata(wheel: Path) -> email.message.Message:
    return email.parser.Parser().parsestr(text(wheel, f"{METADATA}/METADATA"))


def test_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.name == "hyper_parallel-0.1.0-py3-none-any.whl"


def test_wheel_holds_three_packages_and_nothing_else(wheel: Path) -> None:
    assert {name.split("/")[0] for name in names(wheel)} == {*PACKAGES, METADATA}


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_holds_every_module_of(package: str, wheel: Path, root: Path) -> None:
    source = root / SOURCES[package]
    modules = {f"{package}/{path.relative_to(source).as_posix()}" for path in source.rglob("*.py")}
    assert f"{package}/__init__.py" in modules
    assert modules <= names(wheel)


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_marks_as_typed(package: str, wheel: Path) -> None:
    assert f"{package}/py.typed" in names(wheel)


def test_wheel_carries_the_licence(wheel: Path, root: Path) -> None:
    licence = text(wheel, f"{METADATA}/licenses/LICENSE")
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert licence == (root / "LICENSE").read_text()
    assert metadata(wheel)["License-Expression"] == "Apache-2.0"


def test_wheel_declares_the_adapters(wheel: Path) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(text(wheel, f"{METADATA}/entry_points.txt"))
    assert dict(entry_points["hyper_parallel.platforms"]) == {
        "torch": "hyper_parallel_torch.platform:TorchPlatform",
        "mindspore": "hyper_parallel_mindspore.platform:MindSporePlatform",
    }
    assert dict(entry_points["hyper_parallel.local_ranks"]) == {
        "torch": "hyper_parallel_torch.local_ranks",
        "mindspore": "hyper_parallel_mindspore.local_ranks",
    }
    assert dict(entry_points["hyper_parallel.diagnostics"]) == {
        "torch": "hyper_parallel_torch.diagnostics",
        "mindspore": "hyper_parallel_mindspore.diagnostics",
    }


def test_wheel_holds_the_template_of_the_report(wheel: Path) -> None:
    assert "hyper_parallel/parity/report.html.jinja" in names(wheel)


def test_wheel_requires_nothing_without_an_extra(wheel: Path) -> None:
    requirements = metadata(wheel).get_all("Requires-Dist", [])
    assert [line for line in requirements if "extra ==" not in line] == []
    assert set(metadata(wheel).get_all("Provides-Extra", [])) >= {
        "torch",
        "torch-npu",
        "mindspore",
        "demo",
        "parity",
        "test",
        "dev",
    }
    assert metadata(wheel)["Requires-Python"] == ">=3.10"


def test_sdist_holds_everything_that_builds_and_tests_it(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert members >= {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "ci/constraints.txt",
        "ci/setup.sh",
        "hyper_parallel/__init__.py",
        "platform/hyper_parallel_mindspore/__init__.py",
        "platform/hyper_parallel_torch/__init__.py",
        "pyproject.toml",
        "tests/packaging/test_wheel.py",
    }
    assert not any(name.startswith((".venv", "dist/", "build/")) for name in members)


def test_sdist_builds_the_same_wheel(wheel: Path, wheel_from_sdist: Path) -> None:
    assert names(wheel_from_sdist) == names(wheel)
    for name in names(wheel) - {f"{METADATA}/RECORD"}:
        assert text(wheel_from_sdist, name) == text(wheel, name), name


def test_installed_wheel_imports_from_another_folder(installed: Path, python) -> None:
    found = python(
        "import json, hyper_parallel, hyper_parallel_torch, hyper_parallel_mindspore as ms\n"
        "print(json.dumps([m.__file__ for m in (hyper_parallel, hyper_parallel_torch, ms)]))",
        path=installed,
    )
    for package, file in zip(PACKAGES, json.loads(found), strict=True):
        assert Path(file) == installed / package / "__init__.py"


def test_installed_wheel_offers_both_adapters(installed: Path, python) -> None:
    found = python(
        "import importlib.metadata as metadata, sys\n"
        "(dist,) = metadata.distributions(name='hyper-parallel', path=[sys.argv[1]])\n"
        "print(sorted(e.load().__name__ for e in dist.entry_points if e.group == 'hyper_parallel.platforms'))",
        installed,
        path=installed,
    )
    assert found.splitlines()[-1] == "['MindSporePlatform', 'TorchPlatform']"

"""Importing the library loads no framework, and the folder `platform/` hides nothing."""

import json
import sysconfig
from pathlib import Path

import pytest

HEAVY = ("torch", "torch_npu", "mindspore", "numpy")
LOADED = "import json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"


def loaded_after(code: str, python) -> set[str]:
    return set(json.loads(python(f"{code}\n{LOADED}")))


def modules_of(package: str, folder: Path) -> list[str]:
    paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    return sorted(".".join((package, *path.parts)).removesuffix(".__init__") for path in paths)


def test_import_loads_neither_framework_nor_numpy(python) -> None:
    assert loaded_after("import hyper_parallel", python).isdisjoint(HEAVY)


def test_import_loads_no_adapter(python) -> None:
    loaded = loaded_after("import hyper_parallel", python)
    assert not [name for name in loaded if name.startswith("hyper_parallel_")]


def test_core_loads_the_standard_library_only(root: Path, python) -> None:
    core = modules_of("hyper_parallel.core", root / "hyper_parallel" / "core")
    before = loaded_after("", python)
    after = loaded_after("\n".join(f"import {name}" for name in core), python)
    standard = set(json.loads(python("import json, sys; print(json.dumps(sorted(sys.stdlib_module_names)))")))
    assert after - before - standard == {"hyper_parallel"}


def test_platform_folder_is_no_package(root: Path) -> None:
    assert not (root / "platform" / "__init__.py").exists()


def test_platform_folder_holds_packages_only(root: Path) -> None:
    loose = [path.name for path in (root / "platform").iterdir() if path.is_file()]
    assert loose == []


@pytest.mark.parametrize("command", ["import platform", "import uuid, platform"])
def test_platform_is_the_standard_librarys_from_the_root(command: str, root: Path, python) -> None:
    file = python(f"{command}; print(platform.__file__)", cwd=root)
    assert Path(file).parent == Path(sysconfig.get_path("stdlib"))


def test_platform_is_the_standard_librarys_under_pytest() -> None:
    import platform

    assert Path(platform.__file__).parent == Path(sysconfig.get_path("stdlib"))

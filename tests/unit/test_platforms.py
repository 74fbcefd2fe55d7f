"""Which adapter is chosen, each case in a new process with installed distributions and frameworks of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import hyper_parallel

PACKAGE_ROOT = Path(hyper_parallel.__file__).parents[1]
ADAPTER = "class Platform:\n    name = {0!r}\n    framework = {0!r}\n"


class Machine:
    """A site folder that holds what a test installs; ``run`` starts Python with nothing else beside hyper_parallel."""

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.site.mkdir()
        (self.site / "hyper_parallel").symlink_to(PACKAGE_ROOT / "hyper_parallel", target_is_directory=True)

    def framework(self, name: str, source: str = "") -> None:
        (self.site / f"{name}.py").write_text(source)

    def adapter(self, name: str, source: str | None = None) -> None:
        """Install a distribution with one entry point ``name``."""
        module = f"adapter_of_{name}"
        (self.site / f"{module}.py").write_text(ADAPTER.format(name) if source is None else source)
        info = self.site / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hyper_parallel.platforms]\n{name} = {module}:Platform\n")

    def install(self, *names: str) -> None:
        """Frameworks together with adapters that import them."""
        for name in names:
            self.framework(name)
            self.adapter(name, f"import {name}\n{ADAPTER.format(name)}")

    def run(self, code: str, variable: str | None = None) -> str:
        """Run ``code``; what it raises is printed as ``TypeName: message``."""
        program = (
            f"import sys; sys.path.insert(0, {str(self.site)!r})\n"
            "from hyper_parallel import get_platform\n"
            f"try:\n    exec({code!r})\n"
            "except Exception as error:\n    print(f'{type(error).__name__}: {error}')\n"
        )
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "HYPER_PARALLEL"))}
        if variable is not None:
            environment["HYPER_PARALLEL_PLATFORM"] = variable
        return finished([sys.executable, "-I", "-S", "-c", program], environment)


def finished(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


NAME = "print(get_platform().name)"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# ---- the variable


@pytest.mark.parametrize("name", ["torch", "mindspore", "other"])
def test_the_variable_names_the_platform(machine: Machine, name: str) -> None:
    machine.install("torch", "mindspore", "other")
    assert machine.run(NAME, name) == name


def test_the_variable_comes_before_what_is_imported(machine: Machine) -> None:
    machine.install("torch", "mindspore")
    assert machine.run(f"import torch; {NAME}", "mindspore") == "mindspore"


def test_the_variable_is_read_at_first_use_not_at_import(machine: Machine) -> None:
    machine.install("torch", "mindspore")
    code = f"import os; os.environ['HYPER_PARALLEL_PLATFORM'] = 'mindspore'; {NAME}"
    assert machine.run(code, "torch") == "mindspore"


def test_the_platform_is_chosen_once(machine: Machine) -> None:
    machine.install("torch", "mindspore")
    code = "import os; a = get_platform(); os.environ['HYPER_PARALLEL_PLATFORM'] = 'mindspore'; print(get_platform() is a)"
    assert machine.run(code, "torch") == "True"


def test_a_name_that_nobody_registered_lists_the_choices(machine: Machine) -> None:
    machine.install("torch", "mindspore")
    message = machine.run(NAME, "jax")
    assert message == "LookupError: HYPER_PARALLEL_PLATFORM=jax names no platform; choices: mindspore, torch"


def test_a_name_where_nothing_is_registered_says_so(machine: Machine) -> None:
    message = machine.run(NAME, "torch")
    assert message.startswith("LookupError: HYPER_PARALLEL_PLATFORM=torch names no platform")
    assert "no package registers an entry point in the group hyper_parallel.platforms" in message


def test_an_empty_variable_is_as_good_as_none(machine: Machine) -> None:
    machine.install("torch")
    assert machine.run(NAME, "") == "torch"


# ---- a named platform that cannot be loaded


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("torch", "pip install 'hyper-parallel[torch]'"),
        ("mindspore", "pip install 'hyper-parallel[mindspore]'"),
        ("other", "install the package other"),
    ],
)
def test_a_missing_framework_says_which_and_how_to_install_it(machine: Machine, name: str, hint: str) -> None:
    machine.install("spare")
    machine.adapter(name, f"import {name}\n{ADAPTER.format(name)}")
    message = machine.run(NAME, name)
    assert message.startswith(
        f"ImportError: platform {name!r} needs the package {name}, which cannot be imported"
    )
    assert hint in message


def test_torch_npu_that_fails_to_import_names_cann(machine: Machine) -> None:
    machine.framework("torch_npu", "raise ImportError('libascendcl.so: cannot open', name='torch_npu')")
    machine.framework("torch")
    machine.adapter("torch", f"import torch, torch_npu\n{ADAPTER.format('torch')}")
    message = machine.run(NAME, "torch")
    assert "needs the package torch_npu" in message
    assert "source CANN's set_env.sh" in message
    assert "libascendcl.so: cannot open" in message


def test_a_missing_part_of_a_package_names_the_package(machine: Machine) -> None:
    machine.framework("torch")
    machine.adapter("torch", "import torch.distributed.tensor\n")
    message = machine.run(NAME, "torch")
    assert message.startswith("ImportError: platform 'torch' needs the package torch")


def test_a_named_platform_never_falls_through_to_another(machine: Machine) -> None:
    machine.install("mindspore")
    machine.adapter("torch", "import torch\n")
    assert machine.run(f"import mindspore; {NAME}", "torch").startswith("ImportError")


def test_a_failed_choice_is_not_kept(machine: Machine) -> None:
    machine.install("torch")
    code = f"""
import os
try:
    get_platform()
except LookupError:
    os.environ['HYPER_PARALLEL_PLATFORM'] = 'torch'
{NAME}"""
    assert machine.run(code, "nobody") == "torch"


# ---- no variable


@pytest.mark.parametrize("name", ["torch", "mindspore"])
def test_the_only_installed_framework_is_taken(machine: Machine, name: str) -> None:
    machine.install(name)
    machine.adapter("absent", "import absent\n")
    assert machine.run(NAME) == name


@pytest.mark.parametrize("name", ["torch", "mindspore"])
def test_the_imported_framework_is_taken_where_several_are_installed(machine: Machine, name: str) -> None:
    machine.install("torch", "mindspore")
    assert machine.run(f"import {name}; {NAME}") == name


def test_several_installed_frameworks_need_the_variable(machine: Machine) -> None:
    machine.install("torch", "mindspore")
    message = machine.run(NAME)
    assert message.startswith("LookupError: several frameworks are installed")
    assert "set HYPER_PARALLEL_PLATFORM to one of mindspore, torch" in message


def test_several_imported_frameworks_need_the_variable(machine: Machine) -> None:
    machine.install("torch", "mindspore", "other")
    message = machine.run(f"import torch, mindspore; {NAME}")
    assert message.startswith("LookupError: several frameworks are imported")
    assert "set HYPER_PARALLEL_PLATFORM to one of mindspore, other, torch" in message
    assert "(torch, mindspore)" in message or "(mindspore, torch)" in message


def test_no_framework_at_all_names_the_variable_and_the_choices(machine: Machine) -> None:
    machine.adapter("torch", "import torch\n")
    machine.adapter("mindspore", "import mindspore\n")
    message = machine.run(NAME)
    assert message.startswith("LookupError: no supported framework is installed")
    assert "set HYPER_PARALLEL_PLATFORM to one of mindspore, torch" in message


def test_nothing_installed_and_nothing_registered(machine: Machine) -> None:
    message = machine.run(NAME)
    assert message.startswith("LookupError: no supported framework is installed")
    assert "no package registers an entry point" in message


def test_looking_for_frameworks_imports_none(machine: Machine) -> None:
    machine.install("torch", "mindspore")
    code = "import sys\ntry:\n    get_platform()\nexcept LookupError:\n    print({'torch', 'mindspore'} & set(sys.modules))"
    assert machine.run(code) == "set()"


# ---- what would be chosen, and why


SELECTION = "from hyper_parallel.platforms import select_platform as s; x = s(); print(x.name, '|', x.reason)"


@pytest.mark.parametrize(
    ("installed", "variable", "expected"),
    [
        (("torch",), None, "torch | torch is the only supported framework that is installed"),
        (("torch", "mindspore"), "torch", "torch | HYPER_PARALLEL_PLATFORM=torch"),
        (("torch",), "jax", "None | HYPER_PARALLEL_PLATFORM=jax names no platform; choices: torch"),
    ],
)
def test_the_selection_says_why(
    machine: Machine, installed: tuple[str, ...], variable: str | None, expected: str
) -> None:
    machine.install(*installed)
    assert machine.run(SELECTION, variable) == expected


def test_the_selection_of_a_process_that_has_imported_one(machine: Machine) -> None:
    machine.install("torch", "mindspore")
    said = machine.run(f"import mindspore; {SELECTION}")
    assert said == "mindspore | mindspore is the only supported framework that is imported"


def test_the_selection_is_what_get_platform_says(machine: Machine) -> None:
    machine.install("torch", "mindspore")
    failed = machine.run(NAME)
    assert failed == "LookupError: " + machine.run(SELECTION).removeprefix("None | ")


def test_the_selection_loads_nothing(machine: Machine) -> None:
    machine.framework("torch", "raise ImportError('broken')")
    machine.adapter("torch", "import torch\n")
    assert machine.run(SELECTION).startswith("torch |")


# ---- our own entry points


def test_both_adapters_of_this_distribution_are_registered() -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "print(sorted(f'{e.name}={e.value}' for e in entry_points(group='hyper_parallel.platforms')))"
    )
    assert finished([sys.executable, "-c", code], os.environ) == str(
        [
            "mindspore=hyper_parallel_mindspore.platform:MindSporePlatform",
            "torch=hyper_parallel_torch.platform:TorchPlatform",
        ]
    )

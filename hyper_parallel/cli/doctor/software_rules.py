"""Rules on Python, the frameworks and which of them is chosen."""

from __future__ import annotations

import re

from hyper_parallel.cli.doctor.findings import Findings
from hyper_parallel.cli.doctor.rule import ERROR, WARNING, Fields, Rule
from hyper_parallel.platforms import ENVIRONMENT_VARIABLE

# Of MindSpore 2.10, the release that was tested. It matters only where MindSpore is not installed: pip would not
# have installed it on another Python.
MINDSPORE_PYTHONS = ((3, 10), (3, 12))


def _mindspore_on_another_python(findings: Findings) -> Fields:
    lowest, highest = MINDSPORE_PYTHONS
    asked = "mindspore" in findings.wanted or findings.selection.variable == "mindspore"
    missing = findings.machine.packages["mindspore"] is None
    if asked and missing and not lowest <= findings.machine.python[:2] <= highest:
        first, last = (".".join(map(str, each)) for each in MINDSPORE_PYTHONS)
        yield {"python": findings.machine.python_version, "accepted": f"{first} to {last}"}


def _platform_not_installed(findings: Findings) -> Fields:
    asked = dict.fromkeys(findings.wanted, "--platform")
    if findings.selection.variable in findings.selection.choices:
        asked[str(findings.selection.variable)] = ENVIRONMENT_VARIABLE
    for name, by in asked.items():
        platform = findings.platform(name)
        if platform is not None and not platform.installed:
            yield {"name": name, "by": by}


def _platform_unknown(findings: Findings) -> Fields:
    selection = findings.selection
    if selection.variable is not None and selection.name is None:
        yield {"reason": selection.reason}


def _no_platform(findings: Findings) -> Fields:
    if not findings.selection.available:
        yield {}


def _several_platforms(findings: Findings) -> Fields:
    selection = findings.selection
    if selection.variable is None and len(selection.available) > 1:
        first, *others = sorted(selection.available, reverse=True)
        yield {"names": ", ".join(selection.available), "first": first, "others": ", ".join(others)}


def _mindspore_with_numpy_2(findings: Findings) -> Fields:
    mindspore, numpy = (findings.machine.packages[name] for name in ("mindspore", "numpy"))
    if mindspore is not None and numpy is not None and _release(numpy)[0] >= 2:
        yield {"mindspore": mindspore, "numpy": numpy}


def _torch_npu_of_another_torch(findings: Findings) -> Fields:
    """torch_npu X.Y.Z, X.Y.Z.postN and X.Y.ZrcN are built against torch X.Y.Z."""
    torch, torch_npu = (findings.machine.packages[name] for name in ("torch", "torch_npu"))
    if torch_npu is not None and (torch is None or _release(torch) != _release(torch_npu)):
        wanted = ".".join(map(str, _release(torch_npu)))
        yield {"torch_npu": torch_npu, "torch": torch or "not installed", "wanted": wanted}


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else (0,)


RULES = (
    Rule(
        "mindspore_python", ERROR, _mindspore_on_another_python,
        "MindSpore is asked for, but it has no package for Python {python}.",
        "Make an environment with Python {accepted} (tested: 3.11) and install there: "
        "pip install 'hyper-parallel[mindspore]'",
    ),
    Rule(
        "platform_not_installed", ERROR, _platform_not_installed,
        "{by} asks for {name}, which is not installed.",
        "pip install 'hyper-parallel[{name}]', or choose another platform.",
        unless=("mindspore_python",),
    ),
    Rule(
        "platform_unknown", ERROR, _platform_unknown,
        "{reason}.",
        "Set HYPER_PARALLEL_PLATFORM to one of the choices, or unset it.",
    ),
    Rule(
        "no_platform", ERROR, _no_platform,
        "No supported framework is installed.",
        "pip install 'hyper-parallel[torch]' or pip install 'hyper-parallel[mindspore]'.",
        unless=("mindspore_python", "platform_not_installed", "platform_unknown"),
    ),
    Rule(
        "several_platforms", WARNING, _several_platforms,
        "Several frameworks are installed ({names}) and none is chosen: a program that has imported several of them, "
        "or none, when it first calls hyper_parallel raises LookupError.",
        "export HYPER_PARALLEL_PLATFORM={first} (or {others}).",
    ),
    Rule(
        "mindspore_numpy", ERROR, _mindspore_with_numpy_2,
        "MindSpore {mindspore} is installed beside NumPy {numpy}: it imports, but its first operation fails.",
        "pip install 'numpy>=1.26,<2'",
    ),
    Rule(
        "torch_npu_version", ERROR, _torch_npu_of_another_torch,
        "torch_npu {torch_npu} belongs to torch {wanted}, but torch is {torch}.",
        "pip install 'torch=={wanted}', or the torch_npu of your torch: its version begins with torch's.",
    ),
)  # fmt: skip

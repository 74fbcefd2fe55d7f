"""Findings on machines that nobody has at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hyper_parallel.cli.doctor.findings import Check, DeviceKind, Findings, PlatformFinding
from hyper_parallel.cli.doctor.machine import Cann, Devices, Machine
from hyper_parallel.platforms import Selection

CPU = DeviceKind("cpu", "gloo", ("cpu",))
NPU = DeviceKind("npu", "hccl", ("Ascend910B", "Ascend910B"))
CUDA = DeviceKind("cuda", "nccl", ("H200",))

TORCH = PlatformFinding("torch", True, {"torch": None}, (CPU,))
MINDSPORE = PlatformFinding("mindspore", True, {"mindspore": None}, (DeviceKind("cpu", "mccl", ("cpu",)),))
NO_MINDSPORE = PlatformFinding("mindspore", False, {})

SELECTED = Selection(
    "torch",
    "torch is the only supported framework that is installed",
    None,
    ("mindspore", "torch"),
    ("torch",),
)

# A machine with NPUs on which all is well.
ASCEND = Devices(
    npu_files=("/dev/davinci0", "/dev/davinci1"), driver="25.0.rc1", npu_smi="/usr/local/bin/npu-smi"
)
HOME = "/usr/local/Ascend/cann"
SOURCED = Cann(
    variables={"ASCEND_HOME_PATH": HOME, "ASCEND_TOOLKIT_HOME": HOME, "ASCEND_OPP_PATH": f"{HOME}/opp"},
    library=f"{HOME}/lib64",
    version="8.5.0",
    scripts=(f"{HOME}/set_env.sh",),
)
INSTALLED_CANN = Cann(variables={}, version="8.5.0", scripts=(f"{HOME}/set_env.sh",))

HEALTHY = Findings(
    machine=Machine(
        python=(3, 11, 9),
        executable="/usr/bin/python3",
        system="Linux",
        cpu_cores=8,
        hyper_parallel="0.1.0",
        packages={"torch": "2.7.1+cpu", "torch_npu": None, "mindspore": None, "numpy": "1.26.4"},
        devices=Devices(),
        cann=Cann(variables={}),
        variables={},
        interfaces=("lo", "eth0", "enp1"),
    ),
    selection=SELECTED,
    platforms=(NO_MINDSPORE, TORCH),
)


def on_machine(findings: Findings = HEALTHY, **changes: object) -> Findings:
    """Other fields of the machine; ``packages`` are those that differ."""
    packages = changes.pop("packages", {})
    assert isinstance(packages, Mapping)
    machine = replace(findings.machine, packages={**findings.machine.packages, **packages})
    return replace(findings, machine=replace(machine, **changes))


def with_platforms(findings: Findings, *platforms: PlatformFinding) -> Findings:
    return replace(findings, platforms=platforms)


def with_npus(**changes: object) -> Findings:
    """torch_npu on an Ascend machine on which all is well, but for the changes of the machine."""
    torch = replace(TORCH, imports={"torch": None, "torch_npu": None}, devices=(CPU, NPU))
    machine = {"packages": {"torch_npu": "2.7.1.post2"}, "devices": ASCEND, "cann": SOURCED, **changes}
    return with_platforms(on_machine(**machine), NO_MINDSPORE, torch)


def importing(error: str | None, package: str = "torch_npu", **changes: object) -> Findings:
    """The Ascend machine, where a package of torch's fails."""
    findings = with_npus(**changes)
    imports = {"torch": error} if package == "torch" else {"torch": None, package: error}
    torch = replace(TORCH, imports=imports, devices=() if package == "torch" else (CPU,))
    return with_platforms(findings, NO_MINDSPORE, torch)


def with_mindspore(platform: PlatformFinding = MINDSPORE, **changes: object) -> Findings:
    """MindSpore alone."""
    packages = {"mindspore": "2.10.0", "torch": None, **dict(changes.pop("packages", {}))}
    selection = replace(SELECTED, name="mindspore", available=("mindspore",))
    findings = on_machine(replace(HEALTHY, selection=selection), packages=packages, **changes)
    return with_platforms(findings, platform, PlatformFinding("torch", False, {}))


def job(**variables: str) -> Findings:
    return on_machine(variables=variables)


def checked(
    error: str | None = None, found: tuple[float, ...] = (3.0, 3.0), backend: str = "gloo"
) -> Findings:
    check = Check("torch", "cpu", backend, 2, "all_reduce", (3.0, 3.0), found, error, 1.5)
    return replace(HEALTHY, checks=(check,))


@dataclass(frozen=True)
class Case:
    """Findings on which a rule fires, what it then says, and findings on which it is silent."""

    fires: Findings
    words: tuple[str, ...]
    silent: Findings

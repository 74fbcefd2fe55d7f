"""Rules on CANN, and on devices that are there and cannot be used."""

from __future__ import annotations

from collections.abc import Callable

from hyper_parallel.cli.doctor.findings import Findings
from hyper_parallel.cli.doctor.rule import ERROR, WARNING, Fields, Rule

_DEFAULT_SCRIPTS = (
    "/usr/local/Ascend/cann/set_env.sh (before CANN 8.5: /usr/local/Ascend/ascend-toolkit/set_env.sh)"
)
_CANN = ("cann_not_set", "cann_folder_missing", "cann_partly_set")
_NPU = ("npu_no_access", "devices_hidden", "cann_library", "driver_library", *_CANN)


def _cann_folder_missing(findings: Findings) -> Fields:
    cann = findings.machine.cann
    for variable in cann.missing:
        yield {"variable": variable, "path": cann.variables[variable], "script": _script(findings)}


def _cann_not_set(findings: Findings) -> Fields:
    machine = findings.machine
    needs = ["torch_npu"] if machine.packages["torch_npu"] else []
    if machine.packages["mindspore"] and machine.devices.npu_files:
        needs.append("mindspore")
    if needs and not machine.cann.variables:
        yield {"package": " and ".join(needs), "script": _script(findings)}


def _cann_partly_set(findings: Findings) -> Fields:
    cann = findings.machine.cann
    if not cann.variables or _imports_torch_npu(findings):
        return
    lacking = [
        f"{name} is not set" for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH") if name not in cann.variables
    ]
    if cann.library is None:
        lacking.append("no folder of LD_LIBRARY_PATH holds libascendcl.so")
    if lacking:
        yield {"lacking": ", ".join(lacking), "script": _script(findings)}


def _driver_library_missing(findings: Findings) -> Fields:
    yield from _named(findings, _lacks_driver)


def _cann_library_missing(findings: Findings) -> Fields:
    yield from _named(findings, _lacks_cann)


def _symbols_missing(findings: Findings) -> Fields:
    yield from _named(findings, _lacks_symbols)


def _cann_of_another_mindspore(findings: Findings) -> Fields:
    cann, mindspore = findings.machine.cann.version, findings.platform("mindspore")
    if cann is None or mindspore is None or not mindspore.cann_versions:
        return
    if ".".join(cann.split(".")[:2]) not in mindspore.cann_versions:
        accepted = ", ".join(mindspore.cann_versions)
        yield {"cann": cann, "mindspore": findings.machine.packages["mindspore"], "accepted": accepted}


def _script(findings: Findings) -> str:
    scripts = findings.machine.cann.scripts
    return f"source {scripts[0]}" if scripts else f"Install CANN, then source {_DEFAULT_SCRIPTS}"


def _npu_without_package(findings: Findings) -> Fields:
    machine = findings.machine
    if machine.devices.npu_files and not any(machine.packages[name] for name in ("torch_npu", "mindspore")):
        yield {"count": len(machine.devices.npu_files)}


def _npu_access_denied(findings: Findings) -> Fields:
    if findings.machine.devices.denied:
        yield {"files": ", ".join(findings.machine.devices.denied)}


def _npu_not_seen(findings: Findings) -> Fields:
    if findings.machine.packages["torch_npu"] and not findings.machine.devices.npu_files:
        yield {}


def _devices_hidden(findings: Findings) -> Fields:
    machine = findings.machine
    present = {"CUDA": machine.devices.cuda_files, "ASCEND_RT": machine.devices.npu_files}
    for kind, files in present.items():
        variable = f"{kind}_VISIBLE_DEVICES"
        if files and machine.variables.get(variable, "0").strip() in ("", "-1"):
            yield {"variable": variable, "value": machine.variables[variable]}


def _torch_npu_without_device(findings: Findings) -> Fields:
    torch, files = findings.platform("torch"), findings.machine.devices.npu_files
    answered = torch is not None and torch.error is None and _imports_torch_npu(findings)
    if files and answered and not _has(findings, "torch", "npu"):
        yield {"count": len(files)}


def _mindspore_without_device(findings: Findings) -> Fields:
    mindspore, files = findings.platform("mindspore"), findings.machine.devices.npu_files
    if files and mindspore is not None and mindspore.usable and not _has(findings, "mindspore", "npu"):
        reason = (mindspore.no_npu or "it gives no reason").rstrip(".")
        yield {"count": len(files), "reason": reason, "script": _script(findings)}


def _cuda_not_used(findings: Findings) -> Fields:
    torch, files = findings.platform("torch"), findings.machine.devices.cuda_files
    if files and torch is not None and torch.usable and not _has(findings, "torch", "cuda"):
        yield {"count": len(files), "torch": findings.machine.packages["torch"]}


def _imports_torch_npu(findings: Findings) -> bool:
    torch = findings.platform("torch")
    return torch is not None and torch.imports.get("torch_npu", "not installed") is None


def _has(findings: Findings, name: str, device: str) -> bool:
    platform = findings.platform(name)
    return platform is not None and any(kind.type == device for kind in platform.devices)


def explains_import(package: str, error: str) -> bool:
    """Whether a rule here says why a package cannot be imported."""
    return any(lacks(package, error) for lacks in (_lacks_driver, _lacks_cann, _lacks_symbols))


def _named(findings: Findings, lacks: Callable[[str, str], bool]) -> Fields:
    for package, error in findings.import_errors():
        if lacks(package, error):
            yield {"package": package, "error": error, "script": _script(findings)}


def _lacks_driver(package: str, error: str) -> bool:
    return "libascend_hal.so" in error


def _lacks_cann(package: str, error: str) -> bool:
    """In torch_npu's own words without CANN, or the loader's of a library that is CANN's."""
    if package != "torch_npu" or _lacks_driver(package, error):
        return False
    return "set_env.sh" in error or "cannot open shared object file" in error


def _lacks_symbols(package: str, error: str) -> bool:
    return "undefined symbol" in error


RULES = (
    Rule(
        "cann_folder_missing", ERROR, _cann_folder_missing,
        "{variable}={path} names a folder that is not there.",
        "Open a new shell and source the script of the CANN that is installed: {script}",
    ),
    Rule(
        "cann_not_set", ERROR, _cann_not_set,
        "{package} needs CANN, and none of CANN's variables is set in this shell.",
        "{script}",
    ),
    Rule(
        "cann_partly_set", ERROR, _cann_partly_set,
        "CANN's environment is set in part: {lacking}.",
        "{script}",
        unless=("cann_folder_missing",),
    ),
    Rule(
        "driver_library", ERROR, _driver_library_missing,
        "{package} does not find libascend_hal.so, a library of the NPU driver.",
        "Install Ascend's driver (a container needs the host's /usr/local/Ascend/driver mounted), then: "
        "export LD_LIBRARY_PATH=/usr/local/Ascend/driver/lib64/driver:$LD_LIBRARY_PATH",
        unless=("cann_not_set",),
    ),
    Rule(
        "cann_library", ERROR, _cann_library_missing,
        "{package} does not find a library of CANN: {error}.",
        "{script} If that changes nothing, the CANN is incomplete or of another version than {package} needs.",
        unless=_CANN,
    ),
    Rule(
        "versions_mixed", ERROR, _symbols_missing,
        "{package} was built against other versions of its libraries: {error}.",
        "Install versions of torch, torch_npu and CANN that go together; the table is in the README under Install.",
        unless=("torch_npu_version",),
    ),
    Rule(
        "mindspore_cann", WARNING, _cann_of_another_mindspore,
        "CANN {cann} is none of those that MindSpore {mindspore} names: {accepted}.",
        "Install one of these CANN versions, or the MindSpore that belongs to CANN {cann}.",
    ),
    Rule(
        "npu_without_package", ERROR, _npu_without_package,
        "This machine has {count} NPU(s), and neither torch_npu nor MindSpore is installed to use them.",
        "pip install 'hyper-parallel[torch-npu]' or pip install 'hyper-parallel[mindspore]'.",
    ),
    Rule(
        "npu_no_access", ERROR, _npu_access_denied,
        "This user may not open {files}.",
        "sudo usermod -a -G HwHiAiUser $USER (or the group that ls -l shows for the files), then log in again.",
    ),
    Rule(
        "npu_not_seen", ERROR, _npu_not_seen,
        "torch_npu is installed, but this machine shows no NPU: there is no /dev/davinci0.",
        "On a machine with NPUs install Ascend's driver and firmware and see that npu-smi info lists them. A container "
        "needs --device /dev/davinci0 (and so on), /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc. On a "
        "machine without NPUs, pip uninstall torch_npu.",
    ),
    Rule(
        "devices_hidden", WARNING, _devices_hidden,
        "{variable} is set to {value!r}, which hides every device.",
        "unset {variable}, or list the devices: {variable}=0,1",
    ),
    Rule(
        "torch_npu_no_device", ERROR, _torch_npu_without_device,
        "The driver shows {count} NPU(s), but torch_npu finds none.",
        "Run npu-smi info: if it fails, the driver is at fault; if not, compare the versions of driver, CANN and "
        "torch_npu with the table in the README under Install.",
        unless=_NPU,
    ),
    Rule(
        "mindspore_no_device", ERROR, _mindspore_without_device,
        "The driver shows {count} NPU(s), but this MindSpore cannot use them: {reason}.",
        "{script} Then python -c \"import mindspore; mindspore.set_device('Ascend')\" must pass; if it does not, the "
        "MindSpore, CANN and driver do not go together: see the table in the README under Install.",
        unless=_NPU,
    ),
    Rule(
        "cuda_not_used", WARNING, _cuda_not_used,
        "This machine has {count} NVIDIA GPU(s), but torch {torch} finds none.",
        "Install torch's build for CUDA (pip install torch, without the CPU index) and see that nvidia-smi works.",
        unless=("devices_hidden",),
    ),
)  # fmt: skip

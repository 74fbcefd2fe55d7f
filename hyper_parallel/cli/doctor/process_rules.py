"""Rules on what the processes did that import a framework and try its collectives."""

from __future__ import annotations

from hyper_parallel.cli.doctor.ascend_rules import explains_import
from hyper_parallel.cli.doctor.findings import Check, Findings
from hyper_parallel.cli.doctor.rule import ERROR, Fields, Rule

_ADVICE = {
    "gloo": "See that this machine's processes may connect to each other: export GLOO_SOCKET_IFNAME=lo and run this "
    "again; if that helps, the interface that gloo picks is the cause.",
    "nccl": "Run again with NCCL_DEBUG=INFO, which names the cause; NCCL_P2P_DISABLE=1 and NCCL_SOCKET_IFNAME=lo show "
    "whether it is the link between devices or the network.",
    "hccl": "See that npu-smi info lists the devices as healthy and idle, and that driver and CANN go together; "
    "ASCEND_GLOBAL_LOG_LEVEL=1 and ASCEND_SLOG_PRINT_TO_STDOUT=1 make CANN name the cause.",
    "mccl": "Run again with GLOG_v=1, which makes MindSpore name the cause, and a longer --timeout. A firewall or "
    "security rule that keeps processes from 127.0.0.1 has the same effect.",
}
_GLOO_INTERFACE = ("Unable to find address for", "Unable to find interface")


def _import_failed(findings: Findings) -> Fields:
    for package, error in findings.import_errors():
        if not explains_import(package, error):
            version = findings.machine.packages.get(package)
            pinned = package if version is None else f"{package}=={version}"
            yield {"package": package, "error": error, "pinned": pinned}


def _framework_died(findings: Findings) -> Fields:
    for platform in findings.platforms:
        if platform.error is not None:
            yield {"name": platform.name, "error": platform.error.rstrip(".")}


def _gloo_without_interface(findings: Findings) -> Fields:
    error = next((check.error for check in findings.checks if _lacks_interface(check)), None)
    if error is not None:
        yield {"error": error.rstrip("."), "interfaces": ", ".join(findings.machine.interfaces)}


def _check_failed(findings: Findings) -> Fields:
    """Of two calls on one kind of device the first that failed: the second had no chance."""
    seen = set()
    for check in findings.checks:
        where = (check.platform, check.device)
        if check.error is not None and where not in seen and not _lacks_interface(check):
            seen.add(where)
            yield _named(check) | {
                "error": check.error.rstrip("."),
                "advice": _ADVICE.get(check.backend, "See above."),
            }


def _check_wrong(findings: Findings) -> Fields:
    for check in findings.checks:
        if check.error is None and not check.passed:
            yield _named(check) | {"found": _numbers(check.found), "expected": _numbers(check.expected)}


def _named(check: Check) -> dict[str, object]:
    names = ("call", "backend", "ranks", "platform", "device")
    return {name: getattr(check, name) for name in names}


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.6g}" for value in values) or "nothing"


def _lacks_interface(check: Check) -> bool:
    return check.backend == "gloo" and any(text in (check.error or "") for text in _GLOO_INTERFACE)


RULES = (
    Rule(
        "import_failed", ERROR, _import_failed,
        "{package} is installed and cannot be imported: {error}.",
        "python -c 'import {package}' shows it in full. Often a new installation helps: "
        "pip install --force-reinstall {pinned}",
    ),
    Rule(
        "framework_died", ERROR, _framework_died,
        "A process that imports {name} and lists its devices failed: {error}.",
        "Run python -c 'import {name}' by hand. If it hangs, give it longer (--timeout), and see that the driver "
        "answers: npu-smi info or nvidia-smi.",
    ),
    Rule(
        "gloo_interface", ERROR, _gloo_without_interface,
        "gloo found no network interface to use: {error}.",
        "export GLOO_SOCKET_IFNAME=<interface>, one of: {interfaces}.",
        unless=("interface_missing",),
    ),
    Rule(
        "check_failed", ERROR, _check_failed,
        "{call} with {backend} on {ranks} rank(s) of {platform} on {device} failed: {error}.",
        "{advice}",
    ),
    Rule(
        "check_wrong", ERROR, _check_wrong,
        "{call} with {backend} on {ranks} rank(s) of {platform} on {device} gave {found}, not {expected}.",
        "Do not train with this installation. Install released versions of {platform} and of the device's driver that "
        "go together, and report it to {platform} if they do this, too.",
    ),
)  # fmt: skip

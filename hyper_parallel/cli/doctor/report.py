"""Prints a diagnosis for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hyper_parallel.cli.doctor.findings import Check, Diagnosis, Findings, PlatformFinding
from hyper_parallel.cli.doctor.machine import Machine

_STYLES = {"error": "bold red", "warning": "yellow"}


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print what was found, then the problems with their remedies."""
    findings = diagnosis.findings
    table = _table("HyperParallel on this machine")
    table.show_header = False
    for name, text in _facts(findings):
        table.add_row(name, escape(text))
    console.print(table)
    if findings.platforms:
        console.print(_frameworks(findings.platforms))
    if findings.checks:
        console.print(_checks(findings.checks))
    _print_problems(diagnosis, console)


def _table(title: str, *columns: str) -> Table:
    return Table(
        *columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )


def _facts(findings: Findings) -> Iterable[tuple[str, str]]:
    machine, selection = findings.machine, findings.selection
    yield "hyper-parallel", machine.hyper_parallel
    yield "Python", f"{machine.python_version} ({machine.executable})"
    yield "system", f"{machine.system}, {machine.cpu_cores} CPU cores"
    for name, version in machine.packages.items():
        yield name, version or "not installed"
    yield "NVIDIA GPUs", f"{len(machine.devices.cuda_files)}" if machine.devices.cuda_files else "none"
    yield "Ascend NPUs", _npus(machine)
    yield "CANN", _cann(machine)
    variables = (f"{name}={value}" for name, value in machine.variables.items())
    yield "variables of a job", " ".join(variables) or "none"
    chosen = selection.name or "none"
    yield "platform", f"{chosen} ({selection.reason})"


def _npus(machine: Machine) -> str:
    devices = machine.devices
    driver = f"driver {devices.driver}" if devices.driver else "no driver found"
    if not devices.npu_files:
        return "none" if devices.driver is None and devices.npu_smi is None else f"none, {driver}"
    return f"{len(devices.npu_files)}, {driver}" + ("" if devices.npu_smi else ", no npu-smi")


def _cann(machine: Machine) -> str:
    cann = machine.cann
    if not cann.variables and not cann.scripts:
        return "none"
    state = "environment set" if cann.variables else "environment not set"
    return f"{cann.version or 'unknown version'}, {state}" + (f" ({cann.scripts[0]})" if cann.scripts else "")


def _frameworks(platforms: Iterable[PlatformFinding]) -> Table:
    table = _table("Frameworks", "platform", "imports", "can use")
    for each in platforms:
        if not each.installed:
            table.add_row(each.name, "not installed", "")
            continue
        imports = (f"{name}: {'yes' if error is None else 'no'}" for name, error in each.imports.items())
        devices = (f"{len(kind.names)} x {kind.type} ({kind.backend})" for kind in each.devices)
        table.add_row(each.name, ", ".join(imports) or "no answer", ", ".join(devices) or "nothing")
    return table


def _checks(checks: Iterable[Check]) -> Table:
    table = _table("Calls with known results", "call", "platform", "device", "backend", "ranks", "result")
    for check in checks:
        words = "right" if check.passed else "wrong numbers" if check.error is None else "failed"
        style = "green" if check.passed else _STYLES["error"]
        table.add_row(
            check.call, check.platform, check.device, check.backend, str(check.ranks), Text(words, style)
        )
    return table


def _print_problems(diagnosis: Diagnosis, console: Console) -> None:
    for each in diagnosis.problems:
        console.print(Text.assemble((f"{each.severity}: ", _STYLES[each.severity]), each.problem))
        console.print(Padding(Text.assemble(("remedy: ", "bold"), each.remedy), (0, 0, 1, 2)))
    numbers = [
        f"{count} {severity}{'s' * (count != 1)}"
        for severity in _STYLES
        if (count := sum(each.severity == severity for each in diagnosis.problems))
    ]
    console.print(Text(", ".join(numbers) or "No problem found.", "bold" if numbers else "bold green"))

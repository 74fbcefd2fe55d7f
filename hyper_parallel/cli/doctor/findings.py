"""What an examination found, and its form for machines; the package's docstring describes the keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hyper_parallel.cli.doctor.machine import Machine
from hyper_parallel.platforms import Selection

FORMAT = 1
# float32 arithmetic on a handful of small numbers
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Devices of one type that a framework can use, and the collectives library that it has for them."""

    type: str
    backend: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlatformFinding:
    """What a framework says of itself, in a process of its own.

    ``imports``: for each of its packages that is installed, None if it can be imported, else the error. ``error``:
    how the process ended, if it gave no answer. ``no_npu``: why the framework cannot use NPUs, as far as it says.
    ``cann_versions``: those that this version of the framework names as its own; empty where it names none.
    ``has_scheduler``: whether ranks need one more process to meet.
    """

    name: str
    installed: bool
    imports: Mapping[str, str | None]
    devices: tuple[DeviceKind, ...] = ()
    error: str | None = None
    no_npu: str | None = None
    cann_versions: tuple[str, ...] = ()
    has_scheduler: bool = False

    @property
    def usable(self) -> bool:
        return self.installed and self.error is None and self.imports.get(self.name, "missing") is None


@dataclass(frozen=True, slots=True)
class Check:
    """One call on real devices: what it should give, what it gave on the ranks, and the error if it gave nothing."""

    platform: str
    device: str
    backend: str
    ranks: int
    call: str
    expected: tuple[float, ...]
    found: tuple[float, ...]
    error: str | None
    seconds: float

    @property
    def passed(self) -> bool:
        """The right numbers from every rank; NaN is wrong."""
        return (
            self.error is None
            and len(self.found) == len(self.expected)
            and all(
                math.isclose(f, e, rel_tol=_TOLERANCE) for f, e in zip(self.found, self.expected, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """All that the rules look at. ``wanted`` are the platforms that the user named."""

    machine: Machine
    selection: Selection
    platforms: tuple[PlatformFinding, ...] = ()
    checks: tuple[Check, ...] = ()
    wanted: tuple[str, ...] = ()

    def platform(self, name: str) -> PlatformFinding | None:
        return next((each for each in self.platforms if each.name == name), None)

    def import_errors(self) -> Iterator[tuple[str, str]]:
        """Packages that are installed and cannot be imported, and why, with no full stop at the end."""
        for platform in self.platforms:
            for package, error in platform.imports.items():
                if error is not None:
                    yield package, error.rstrip(".")


@dataclass(frozen=True, slots=True)
class Problem:
    """``rule`` and ``severity`` ("error" or "warning") for machines, the sentences for people."""

    rule: str
    severity: str
    problem: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings and what follows from them."""

    findings: Findings
    problems: tuple[Problem, ...]

    @property
    def healthy(self) -> bool:
        """No error; warnings do not count."""
        return all(problem.severity != "error" for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        findings, machine = self.findings, self.findings.machine
        return {
            "format": FORMAT,
            "healthy": self.healthy,
            "hyper_parallel": machine.hyper_parallel,
            "python": {"version": machine.python_version, "executable": machine.executable},
            "system": {"name": machine.system, "cpu_cores": machine.cpu_cores},
            "packages": dict(machine.packages),
            "devices": asdict(machine.devices),
            "cann": asdict(machine.cann),
            "variables": dict(machine.variables),
            "selection": asdict(findings.selection),
            "platforms": [asdict(each) for each in findings.platforms],
            "checks": [asdict(each) | {"passed": each.passed} for each in findings.checks],
            "problems": [asdict(each) for each in self.problems],
        }

"""Looks at the machine, asks each framework about itself, and tries a collective and a clip on each kind of device."""

from __future__ import annotations

import importlib.util
import math
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.cli.doctor.child import SCHEDULER, find_diagnostics
from hyper_parallel.cli.doctor.findings import Check, DeviceKind, Diagnosis, Findings, PlatformFinding
from hyper_parallel.cli.doctor.machine import Machine, read_machine
from hyper_parallel.cli.doctor.processes import Answer, Question, ask
from hyper_parallel.cli.doctor.rules import find_problems
from hyper_parallel.platforms import select_platform

_CPU_RANKS = 2
_ELEMENTS = 3
CALLS = ("all_reduce", "clip_grad_norm_")


def examine(
    wanted: Sequence[str] = (),
    *,
    timeout: float = 120.0,
    collectives: bool = True,
    machine: Machine | None = None,
    progress: Callable[[str], object] = lambda what: None,
) -> Diagnosis:
    """Examine this machine.

    Args:
        wanted: the platforms to examine; empty: all that are registered.
        timeout: seconds for one process to answer.
        collectives: whether to try collectives and clips.
        machine: what ``read_machine`` gives.
        progress: called with what is done next.
    """
    registered = find_diagnostics()
    platforms, checks = [], []
    for name in sorted(wanted or registered):
        progress(f"importing {name}")
        finding = describe_platform(name, timeout)
        platforms.append(finding)
        for kind in finding.devices if finding.usable and collectives else ():
            progress(f"{kind.backend} on {name}, {kind.type}")
            checks.extend(exercise(finding, kind, timeout))
    findings = Findings(
        machine=machine or read_machine(),
        selection=select_platform(),
        platforms=tuple(platforms),
        checks=tuple(checks),
        wanted=tuple(wanted),
    )
    return Diagnosis(findings, find_problems(findings))


def describe_platform(name: str, timeout: float) -> PlatformFinding:
    """Ask a framework about itself, if it is installed."""
    if importlib.util.find_spec(name) is None:
        return PlatformFinding(name, installed=False, imports={})
    (answer,) = ask([Question(name, "describe", {})], timeout)
    values = answer.values
    return PlatformFinding(
        name,
        installed=True,
        imports=values.get("imports", {}),
        devices=tuple(
            DeviceKind(d["type"], d["backend"], tuple(d["names"])) for d in values.get("devices", ())
        ),
        error=answer.error,
        no_npu=values.get("no_npu"),
        cann_versions=tuple(values.get("cann_versions", ())),
        has_scheduler=values.get("has_scheduler", False),
    )


def exercise(platform: PlatformFinding, kind: DeviceKind, timeout: float) -> list[Check]:
    """Both calls, on one rank for each device, or on two of the CPU."""
    ranks = _CPU_RANKS if kind.type == "cpu" else len(kind.names)
    start = time.monotonic()
    answers = _ask_ranks(platform, kind.type, ranks, timeout)
    seconds = round(time.monotonic() - start, 2)
    return [
        Check(
            platform=platform.name,
            device=kind.type,
            backend=kind.backend,
            ranks=ranks,
            call=call,
            expected=_expected(call, ranks),
            found=_found(call, answers),
            error=_error(call, answers),
            seconds=seconds,
        )
        for call in CALLS
    ]


def _ask_ranks(platform: PlatformFinding, device: str, ranks: int, timeout: float) -> list[Answer]:
    # Bound and never listening: nobody else is given the port, yet who sets SO_REUSEADDR, too, can bind it.
    with (
        tempfile.TemporaryDirectory(prefix="hyper_parallel_doctor_") as folder,
        socket.socket() as reservation,
    ):
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        shared = {
            "device": device,
            "world_size": ranks,
            "port": reservation.getsockname()[1],
            "folder": folder,
            "timeout": timeout,
        }
        members = range(SCHEDULER if platform.has_scheduler else 0, ranks)
        questions = [
            Question(platform.name, "exercise", {**shared, **_inputs(rank)}, helper=rank == SCHEDULER)
            for rank in members
        ]
        return ask(questions, timeout)


def _inputs(rank: int) -> Mapping[str, Any]:
    """The number and the part of the gradient that a rank contributes."""
    return {"rank": rank, "number": rank + 1.0, "gradient": _gradient(rank)}


def _gradient(rank: int) -> list[float]:
    return [float(rank * _ELEMENTS + index + 1) for index in range(_ELEMENTS)]


def _expected(call: str, ranks: int) -> tuple[float, ...]:
    """What all ranks should give, one after another: the sum of 1, 2, ...; the norm and the clipped elements."""
    if call == "all_reduce":
        return (sum(rank + 1.0 for rank in range(ranks)),) * ranks
    gradients = [_gradient(rank) for rank in range(ranks)]
    norm = math.sqrt(math.fsum(value**2 for gradient in gradients for value in gradient))
    return tuple(v for gradient in gradients for v in (norm, *(value / (norm + 1e-6) for value in gradient)))


def _found(call: str, answers: Sequence[Answer]) -> tuple[float, ...]:
    return tuple(value for answer in answers for value in answer.values.get(call, ()))


def _error(call: str, answers: Sequence[Answer]) -> str | None:
    """What kept ranks from the call's result; a rank that got further says nothing about this call."""
    lacking = [(rank, answer.error) for rank, answer in enumerate(answers) if call not in answer.values]
    by_error: dict[str | None, list[int]] = {}
    for rank, error in lacking:
        by_error.setdefault(error, []).append(rank)
    # If some ranks failed, the silence of those that waited for them is no news.
    told = {e: r for e, r in by_error.items() if e and not e.startswith("no answer")} or by_error
    texts = [f"rank {', '.join(map(str, ranks))}: {error or 'no result'}" for error, ranks in told.items()]
    return "; ".join(texts) or None

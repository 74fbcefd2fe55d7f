"""Where ``torch.nn.utils.clip_grad_norm_`` raises, hangs or gives another number, and what ``hyper_parallel`` gives.

``python benchmarks/beside_torch.py`` runs each case on real gloo ranks, once with each function, every run in processes of
its own: a rank that waits for others that have raised shows as a hang. ``--output docs/beside_torch.md`` also writes
the table as Markdown. Cases where both are right are printed as such.
"""

from __future__ import annotations

import math
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import hyper_parallel
from benchmarks.beside_torch_cases import CASES, SETTLED, Case
from hyper_parallel.parity.pool import RankFailure, RankPool

WRONG = 1e-5
"""Relative error of a norm above which it counts as wrong."""
COLUMNS = ("case", "ranks", "float64", "torch.nn.utils", "hyper_parallel")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one function did in one case."""

    text: str
    right: bool


def judged(case: Case, function: str, expected: float) -> Verdict:
    """Run a case on ranks of its own."""
    with RankPool("torch", case.ranks) as pool:
        try:
            ranks = pool.run("benchmarks.beside_torch_cases:run", case.name, function, timeout=6 * SETTLED)
        except RankFailure as failure:
            return Verdict(_hang(str(failure)), False)
    errors = sorted({found["error"] for found in ranks if "error" in found})
    if not errors:
        return _compared(case, ranks, expected)
    who = "every rank raises" if all("error" in found for found in ranks) else "some ranks raise"
    return Verdict(f"{who if case.ranks > 1 else 'raises'} {'; '.join(map(_short, errors))}", False)


def _compared(case: Case, ranks: list[dict[str, Any]], expected: float) -> Verdict:
    norms = [found["norm"] for found in ranks]
    error = max(_relative(norm, expected) for norm in norms)
    text = (
        _number(norms[0]) if len(set(map(str, norms))) == 1 else f"per rank {', '.join(map(_number, norms))}"
    )
    if error > WRONG and math.isfinite(error):
        text += f" (off by {error:.1e})"
    factors = [factor for found in ranks for factor in found["factors"]]
    wanted = min(1.0, 1.0 / (expected + 1e-6))
    worst = max(factors, key=lambda factor: _relative(factor, wanted), default=wanted)
    scaled = math.isnan(expected) or _relative(worst, wanted) <= case.tolerance
    if not scaled and error <= WRONG:
        text += f"; scaled by {_number(worst)} instead of {_number(wanted)}"
    return Verdict(text, error <= WRONG and scaled)


def _relative(value: float, expected: float) -> float:
    if math.isnan(expected) or math.isinf(expected) or expected == 0:
        same = value == expected or (math.isnan(value) and math.isnan(expected))
        return 0.0 if same else math.inf
    return abs(value / expected - 1) if math.isfinite(value) else math.inf


def _number(value: float) -> str:
    return f"{value:.8g}"


def _short(error: str) -> str:
    text = " ".join(error.split())
    return text if len(text) <= 110 else f"{text[:107]}..."


def _hang(failure: str) -> str:
    raised = dict.fromkeys(re.findall(r"^(?:\w+\.)*(\w*Error: .*)$", failure, re.MULTILINE))
    who = re.findall(r"^((?:rank \d+(?:, )?)+) raised:", failure, re.MULTILINE)
    silent = re.search(r"(?:silent ranks:|no answer from ranks) \[([\d, ]+)\]", failure)
    parts = [f"{', '.join(who)} raises {_short('; '.join(raised))}"] if raised else []
    if silent:
        parts.append(f"rank {silent.group(1)} hangs")
    return "; ".join(parts) or _short(failure)


def _versions() -> str:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    ) if Path("/proc/cpuinfo").exists() else platform.machine()  # fmt: skip
    return (
        f"torch {torch.__version__}, hyper-parallel {hyper_parallel.__version__}, Python "
        f"{platform.python_version()}, gloo on {cpu}"
    )


def _markdown(rows: list[tuple[str, ...]], same: list[str]) -> str:
    lines = [
        "# Beside `torch.nn.utils.clip_grad_norm_`",
        "",
        "Written by `python benchmarks/beside_torch.py --output docs/beside_torch.md`. Every row was run, with real",
        f"processes and collectives, on {_versions()}.",
        f"A rank hangs if it is still waiting {SETTLED:g} s after the others have returned or raised, or if none has done",
        f"so after {6 * SETTLED:g} s.",
        "",
        "Gradients are clipped to a norm of 1. float64 is NumPy's norm of the unsharded gradients. Torch's function has",
        "no argument for pipeline stages, nor a way to say that plain tensors are shards: there it gives local norms.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows),
    ]
    if same:
        lines += ["", f"Both were right in: {'; '.join(same)}."]
    return "\n".join([*lines, ""])


def main(
    output: Annotated[Path | None, typer.Option(help="Write the table to this Markdown file.")] = None,
    only: Annotated[str, typer.Option(help="Run the cases whose name contains this.")] = "",
) -> None:
    """Run the cases and print the table; fails if hyper_parallel is wrong in any."""
    table = Table(*COLUMNS, title=_versions())
    rows: list[tuple[str, ...]] = []
    same: list[str] = []
    wrong = 0
    for case in CASES.values():
        if only not in case.name:
            continue
        expected = case.expected()
        theirs, ours = (judged(case, function, expected) for function in ("torch", "ours"))
        row = (case.name, str(case.ranks), _number(expected), theirs.text, ours.text)
        wrong += not ours.right
        mark = "" if ours.right else "[red]"
        table.add_row(
            *row[:3], theirs.text if not theirs.right else f"[green]{theirs.text}", mark + ours.text
        )
        if theirs.right:
            same.append(case.name)
        else:
            rows.append(row)
    Console().print(table)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(_markdown(rows, same))
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

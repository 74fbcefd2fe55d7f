"""Runs the suite with a progress bar, writes the report and prints the table.

The report comes first, as the terminal may be gone when a launcher's rank has died.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import datetime, timezone

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hyper_parallel.parity.cases import Case
from hyper_parallel.parity.pool import RankPool
from hyper_parallel.parity.report import build_document, write_report
from hyper_parallel.parity.suite import OpenRanks, Result, Settings, SuiteRun, run_suite, unrun_suite

_MAX_SHOWN = 20


def run_and_show(settings: Settings, cases: Sequence[Case], open_ranks: OpenRanks = RankPool) -> int:
    """Run the suite; returns 0 if every case passed and 1 if not. SIGTERM acts as Ctrl-C from then on."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console, started = Console(), datetime.now(timezone.utc)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting ranks", total=len(cases) * len(settings.platforms))

        def advance(platform: str, case: Case) -> None:
            progress.update(task, advance=1, description=f"{platform}, {case.world_size} ranks")

        run = run_suite(settings, cases, advance, open_ranks)
    return _conclude(console, settings, run, started)


def show_unrun(settings: Settings, cases: Sequence[Case], reason: str) -> int:
    """Report that no case could run; returns 1."""
    run = unrun_suite(settings.platforms, cases, f"the ranks did not come together:\n{reason}")
    return _conclude(Console(), settings, run, datetime.now(timezone.utc))


def _conclude(console: Console, settings: Settings, run: SuiteRun, started: datetime) -> int:
    paths = write_report(build_document(settings, run, started), settings.report) if settings.report else ()
    console.print(_table(run.results, run.platforms))
    for text in _problems(run.results):
        console.print(text, style="red", markup=False)
    failed = sum(bool(result.failures) for result in run.results)
    passed = sum(result.passed for result in run.results)
    unrun = len(run.results) - passed - failed
    console.print(
        f"{passed} passed, {failed} failed" + (f", {unrun} not run" if unrun else ""),
        style="bold green" if run.passed else "bold red",
    )
    for path in paths:
        console.print(f"report: {path}", markup=False, soft_wrap=True)
    return int(not run.passed)


def _table(results: Sequence[Result], platforms: Sequence[str]) -> Table:
    table = Table(
        title="Parity: passed cases, and the largest relative error of a float32 norm against float64"
    )
    table.add_column("parallelism")
    table.add_column("ranks", justify="right")
    for platform in platforms:
        table.add_column(platform, justify="right")
    if len(platforms) > 1:
        table.add_column("between platforms", justify="right")
    for parallelism, world_size in dict.fromkeys((r.case.parallelism, r.case.world_size) for r in results):
        rows = [r for r in results if (r.case.parallelism, r.case.world_size) == (parallelism, world_size)]
        cells = [_cell(rows, platform) for platform in platforms]
        differing = sum("between platforms" in row.failures for row in rows)
        if len(platforms) > 1:
            cells.append(f"[red]{differing} differ" if differing else "[green]agree")
        table.add_row(parallelism, str(world_size), *cells)
    return table


def _cell(rows: Sequence[Result], platform: str) -> str:
    passed = sum(platform not in row.failures and platform not in row.not_run for row in rows)
    errors = [row.verdicts[platform].largest_error for row in rows if platform in row.verdicts]
    known = [error for error in errors if error == error]
    error = f"{max(known):.1e}" if known else "-"
    return f"[{'green' if passed == len(rows) else 'red'}]{passed}/{len(rows)}[/]  {error}"


def _problems(results: Sequence[Result]) -> list[str]:
    found = [f"{where}: {text}" for row in results for where, texts in row.failures.items() for text in texts]
    found += dict.fromkeys(
        f"{platform}, not run: {reason}" for row in results for platform, reason in row.not_run.items()
    )
    more = len(found) - _MAX_SHOWN
    return found if more <= 0 else [*found[:_MAX_SHOWN], f"and {more} more"]

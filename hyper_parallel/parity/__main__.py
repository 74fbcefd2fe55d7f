"""``python -m hyper_parallel.parity``: run the parity suite on this machine and print a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hyper_parallel.parity.cases import Case, build_cases
from hyper_parallel.parity.suite import Result, run_suite

_MAX_SHOWN = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; returns 0 if every case passed and 1 if not."""
    options = _parser().parse_args(arguments)
    console = Console()
    cases = [
        case
        for world_size in options.world_sizes
        for case in build_cases(world_size)
        if all(word in case.name for word in options.select)
    ]
    if not cases:
        console.print(f"no case matches {options.select}")
        return 1
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting ranks", total=len(cases) * len(options.platforms))

        def advance(platform: str, case: Case) -> None:
            progress.update(task, advance=1, description=f"{platform}, {case.world_size} ranks")

        results = run_suite(options.platforms, cases, options.device, advance)
    console.print(_table(results, options.platforms))
    return _summary(console, results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hyper_parallel.parity", description=__doc__)
    parser.add_argument("--platforms", nargs="+", default=["torch", "mindspore"], metavar="NAME")
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[1, 2, 3, 4], metavar="N")
    parser.add_argument("--device", default="cpu", help="where the tensors live (only cpu has been tested)")
    parser.add_argument(
        "--select", nargs="+", default=[], metavar="WORD", help="cases whose name has all words"
    )
    return parser


def _table(results: Sequence[Result], platforms: Sequence[str]) -> Table:
    table = Table(
        title="Parity: passed cases, and the largest relative error of a float32 norm against float64"
    )
    table.add_column("parallelism")
    table.add_column("ranks", justify="right")
    for platform in platforms:
        table.add_column(platform, justify="right")
    table.add_column("between platforms", justify="right")
    for parallelism, world_size in dict.fromkeys((r.case.parallelism, r.case.world_size) for r in results):
        rows = [r for r in results if (r.case.parallelism, r.case.world_size) == (parallelism, world_size)]
        cells = [_cell(rows, platform) for platform in platforms]
        differing = sum("between platforms" in row.failures for row in rows)
        agreement = "-" if len(platforms) < 2 else f"[red]{differing} differ" if differing else "[green]agree"
        table.add_row(parallelism, str(world_size), *cells, agreement)
    return table


def _cell(rows: Sequence[Result], platform: str) -> str:
    passed = sum(platform not in row.failures for row in rows)
    error = max(row.verdicts[platform].largest_error for row in rows)
    return f"[{'green' if passed == len(rows) else 'red'}]{passed}/{len(rows)}[/]  {error:.1e}"


def _summary(console: Console, results: Sequence[Result]) -> int:
    failures = [
        f"{where}: {text}" for row in results for where, texts in row.failures.items() for text in texts
    ]
    for text in failures[:_MAX_SHOWN]:
        console.print(text, style="red", markup=False)
    if len(failures) > _MAX_SHOWN:
        console.print(f"and {len(failures) - _MAX_SHOWN} more")
    failed = sum(bool(row.failures) for row in results)
    console.print(
        f"{len(results) - failed} passed, {failed} failed", style="bold red" if failed else "bold green"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The command line of the parity suite, for ``python -m hyper_parallel.parity`` and ``hyper-parallel parity``.

On a launcher's ranks every rank runs this command; else it starts ranks on this machine. Whatever needs a package of
the extra ``parity`` besides typer is imported when the command runs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hyper_parallel.parity.launcher import (
    FRAMEWORKS,
    Launch,
    LaunchError,
    check_device,
    check_launch,
    detect_launch,
)
from hyper_parallel.parity.local_ranks import find_launched_ranks

_PACKAGES = ("jinja2", "junitparser", "numpy", "rich")
_SEVERAL = ("--platforms", "--world-sizes", "--select")


class SpacedCommand(TyperCommand):
    """Takes ``--platforms torch mindspore`` for ``--platforms torch --platforms mindspore``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


def spread(arguments: list[str]) -> list[str]:
    """Repeat the option before each of its values."""
    spread: list[str] = []
    option: str | None = None
    for argument in arguments:
        if argument.startswith("-"):
            option = argument if argument in _SEVERAL else None
            spread.append(argument)
        elif option is not None and spread[-1] != option:
            spread += [option, argument]
        else:
            spread.append(argument)
    return spread


def parity_command(
    platforms: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME...", help="Default: torch mindspore; on a launcher's ranks, its framework."
        ),
    ] = None,
    world_sizes: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N...", min=1, help="Default: 1 2 3 4; on a launcher's ranks, as many as there are."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the tensors live: cpu, cuda or npu.")] = "cpu",
    select: Annotated[
        list[str] | None, typer.Option(metavar="WORD...", help="Only cases whose name has all words.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for one case.")] = 120.0,
    report: Annotated[
        Path | None, typer.Option(help="Write junit.xml, parity.json and parity.html into this directory.")
    ] = None,
) -> None:
    """Compare norms and clipped gradients with a float64 oracle, on every parallelism and dtype; 1 if a case fails.

    Starts ranks on this machine, or runs on the ranks of a launcher: torchrun --nproc-per-node 8 -m
    hyper_parallel.parity --device npu, or msrun --worker_num 8 --local_worker_num 8 --join True python -m
    hyper_parallel.parity --device npu.
    """
    asked, sizes, words = tuple(platforms or ()), tuple(world_sizes or ()), tuple(select or ())
    try:
        launch = detect_launch(os.environ)
        if launch is not None:
            launch = check_launch(launch, asked, sizes, os.environ)
        else:
            check_device(device, asked or FRAMEWORKS)
        # The scheduler, too, as it would wait for ranks that have refused; it runs beside rank 0.
        if report is not None and (launch is None or launch.rank == 0 or launch.scheduler):
            _check_folder(report)
        status = _run(launch, asked, sizes, words, device, timeout, str(report.resolve()) if report else None)
    except LaunchError as error:
        _refuse(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        _refuse(f"{package} is missing: pip install 'hyper-parallel[parity]'")
    raise typer.Exit(status)


def _run(
    launch: Launch | None,
    platforms: tuple[str, ...],
    world_sizes: tuple[int, ...],
    select: tuple[str, ...],
    device: str,
    timeout: float,
    report: str | None,
) -> int:
    from hyper_parallel.parity.cases import selected_cases
    from hyper_parallel.parity.launched_rank import run_launched
    from hyper_parallel.parity.suite import Settings
    from hyper_parallel.parity.terminal import run_and_show

    sizes = (launch.world_size,) if launch is not None else world_sizes or (1, 2, 3, 4)
    cases = selected_cases(sizes, select)
    if not cases:
        _refuse(f"no case for {' '.join(map(str, sizes))} ranks has all of these words: {' '.join(select)}")
    if launch is not None:
        settings = Settings((launch.platform,), device, timeout, report, launch.launcher)
        try:
            local = find_launched_ranks(launch.platform)
        except LookupError as error:
            raise LaunchError(str(error)) from error
        return run_launched(local, launch, settings, select)
    return run_and_show(Settings(platforms or FRAMEWORKS, device, timeout, report), cases)


def _check_folder(report: Path) -> None:
    """Find out before the run whether the report can be written after it."""
    try:
        report.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=report).close()
    except OSError as error:
        raise LaunchError(f"--report {report}: cannot write there: {error.strerror}") from error


def _refuse(message: str) -> Any:
    typer.echo(f"parity: {message}", err=True)
    raise typer.Exit(2)


def mount(app: typer.Typer) -> None:
    """Add the subcommand ``parity`` to an app."""
    app.command("parity", cls=SpacedCommand)(parity_command)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, add_completion=False)
    mount(app)
    try:
        app(arguments, prog_name="python -m hyper_parallel.parity", standalone_mode=True)
    except SystemExit as end:
        return int(end.code or 0) if not isinstance(end.code, str) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the demo shows in the terminal: a bar and a row per epoch while it trains, and at the end what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import numpy as np
from digits_data import MESH_DIM_NAMES, Digits, Settings
from digits_run import Run
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

_EPOCH_COLUMNS = {
    "epoch": 5,
    "loss": 8,
    "norm (mean)": 11,
    "norm (max)": 10,
    "clipped": 7,
    "test accuracy": 13,
}


class LiveReport:
    """One backend's training as it goes on: rows appear above a bar that moves. A context manager."""

    def __init__(self, console: Console, name: str, settings: Settings, steps_per_epoch: int) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._steps = steps_per_epoch * settings.epochs
        self._rows = 0
        self._progress = Progress(
            TextColumn("[bold cyan]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[latest]}"),
            TimeElapsedColumn(),
            console=console,
            expand=True,
        )
        starting = f"starting {settings.world_size} processes"
        self._task = self._progress.add_task(name, total=None, latest=starting)

    def __enter__(self) -> LiveReport:
        self._progress.console.print()
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, run: Run) -> None:
        """Move the bar, and print the rows of epochs that have ended."""
        latest = f"loss {run.losses[-1]:.4f}, norm {run.norms[-1]:.4f}"
        self._progress.update(self._task, total=self._steps, completed=len(run.norms), latest=latest)
        for epoch in range(self._rows, len(run.accuracies)):
            self._progress.console.print(Padding(self._row(run, epoch), (0, 0, 0, 2)))
        self._rows = len(run.accuracies)

    def _row(self, run: Run, epoch: int) -> Table:
        # A table of its own for each row, since what is printed cannot grow; fixed widths make them one.
        table = Table(box=None, show_header=epoch == 0, header_style="dim", padding=(0, 2, 0, 0))
        for name, width in _EPOCH_COLUMNS.items():
            table.add_column(name, width=width, justify="right")
        steps = slice(epoch * self._steps_per_epoch, (epoch + 1) * self._steps_per_epoch)
        norms = np.array(run.norms[steps])
        table.add_row(
            str(epoch + 1),
            f"{np.mean(run.losses[steps]):.4f}",
            f"{norms.mean():.4f}",
            f"{norms.max():.4f}",
            f"{run.clipped(steps):.0%}",
            f"{run.accuracies[epoch]:.1%}",
        )
        return table


def print_heading(console: Console, settings: Settings, digits: Digits) -> None:
    """What is about to be trained, and how."""
    copies, shards = settings.mesh_shape
    ranks = "1 rank" if settings.world_size == 1 else f"{settings.world_size} ranks"
    steps = digits.steps_per_epoch(settings)
    console.print(
        f"[bold]Handwritten digits[/bold]: {len(digits.train)} to learn from, {len(digits.test)} to test on\n"
        f"{ranks} on a {copies} x {shards} mesh ({' x '.join(MESH_DIM_NAMES)}), one process each\n"
        f"{settings.epochs} epochs of {steps} steps with {settings.batch_size} images, max_norm {settings.max_norm:g}; "
        f"norms are those before clipping",
        highlight=False,
        soft_wrap=True,
    )


def print_summary(console: Console, runs: Sequence[Run], reference: Run) -> None:
    """The backends side by side, and each against the reference."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("", "last loss", "peak norm", "clipped", "accuracy", "norms off", "seconds"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for run in (*runs, reference):
        table.add_row(
            run.name if run is reference else f"[bold cyan]{run.name}",
            f"{run.losses[-1]:.4f}",
            f"{max(run.norms):.4f}",
            f"{run.clipped():.0%}",
            f"{run.accuracies[-1]:.1%}",
            "" if run is reference else f"{run.differences(reference).max():.1e}",
            f"{run.seconds:.1f}",
        )
    console.print(table)
    note = f"norms off: largest relative difference from {reference.name}, which is one process, no library"
    console.print(f"[dim]{note}", highlight=False)
    console.print()

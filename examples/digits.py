"""Train on handwritten digits with PyTorch and with MindSpore, in several processes each, and compare.

Both backends start from the same weights, see the same batches, and clip with ``hyper_parallel.clip_grad_norm_``:
PyTorch under FSDP2, MindSpore with gradients and weights sharded by hand, on a mesh of replicas x shards. A third
training in one process, float64 and plain NumPy, says what the numbers should be.

    python examples/digits.py --platform both --world-size 4

The exit status is 1 if a backend learns too little or the norms differ by more than the tolerance, and 2 if a
training could not be carried through.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import combinations
from pathlib import Path
from typing import Annotated

import digits_data
import typer
from digits_data import Digits, Settings
from digits_report import LiveReport, print_heading, print_summary
from digits_run import Run, train, train_reference
from rich.console import Console
from rich.markup import escape

from hyper_parallel.parity.pool import RankFailure

_FORMATS = (".pdf", ".png", ".svg")


class Platform(str, Enum):
    """What to train with."""

    TORCH = "torch"
    MINDSPORE = "mindspore"
    BOTH = "both"


def main(
    platform: Annotated[Platform, typer.Option(help="The backend.")] = Platform.BOTH,
    world_size: Annotated[int, typer.Option(min=1, max=16, help="Processes for each backend.")] = 4,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 15,
    max_norm: Annotated[
        float, typer.Option(min=0.0, help="Clip gradients to this norm; inf never clips.")
    ] = 0.4,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 0.1,
    momentum: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.9,
    batch_size: Annotated[int, typer.Option(min=16, max=1024, help="Images of all processes together.")] = 96,
    seed: Annotated[int, typer.Option(min=0, help="For the first weights and the order of images.")] = 0,
    output: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")] = Path("demo.png"),
    min_accuracy: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="On the test images, of every backend.")
    ] = 0.95,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Relative, between the norms of any step.")
    ] = 1e-5,
) -> None:
    """Train on handwritten digits with PyTorch and MindSpore in several processes, and compare their gradient norms."""
    _check_output(output)
    from digits_picture import draw  # now rather than after the training, when it would fail too late

    console = Console()
    settings = Settings(world_size, epochs, max_norm, learning_rate, momentum, batch_size, seed)
    digits = digits_data.load(seed)
    print_heading(console, settings, digits)
    reference = train_reference(settings, digits)
    names = ["torch", "mindspore"] if platform is Platform.BOTH else [platform.value]
    try:
        runs = [_train_live(console, name, settings, digits) for name in names]
    except RankFailure as error:
        console.print(f"[red]FAILED[/red]: {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
    print_summary(console, runs, reference)
    draw(output, runs, reference, digits.steps_per_epoch(settings), tolerance)
    console.print(f"Loss and norm of every step: {output}", highlight=False, soft_wrap=True)
    one, other = (*runs, reference)[:2]
    console.print(comparison(one, other, tolerance), highlight=False, soft_wrap=True)
    failures = find_failures(runs, reference, min_accuracy, tolerance)
    for failure in failures:
        console.print(f"[red]FAILED[/red]: {failure}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if failures else 0)


def comparison(one: Run, other: Run, tolerance: float) -> str:
    """The one line that the demo is about."""
    largest = one.differences(other).max()
    return (
        f"Norms of {one.name} and {other.name} over {len(one.norms)} steps: "
        f"largest relative difference {largest:.1e} (tolerance {tolerance:g})"
    )


def find_failures(runs: Sequence[Run], reference: Run, min_accuracy: float, tolerance: float) -> list[str]:
    """Every reason not to be content."""
    failures = [
        f"test accuracy of {run.name}: {run.accuracies[-1]:.1%}, below {min_accuracy:.1%}"
        for run in runs
        if run.accuracies[-1] < min_accuracy
    ]
    for one, other in combinations((*runs, reference), 2):
        difference = one.differences(other).max()
        if not difference <= tolerance:  # NaN, too
            failures.append(
                f"norms of {one.name} and {other.name} differ by {difference:.1e}, above {tolerance:g}"
            )
    for run in runs:
        if run.uneven_steps:
            failures.append(f"ranks of {run.name} were given different norms in steps {run.uneven_steps}")
    return failures


def _train_live(console: Console, name: str, settings: Settings, digits: Digits) -> Run:
    with LiveReport(console, name, settings, digits.steps_per_epoch(settings)) as report:
        return train(name, settings, digits, report.show)


def _check_output(output: Path) -> None:
    """Raises: typer.BadParameter, before minutes are spent on what cannot succeed."""
    if output.suffix not in _FORMATS:
        raise typer.BadParameter(f"--output must end in one of {', '.join(_FORMATS)}, got {output}")
    if not output.parent.is_dir():
        raise typer.BadParameter(f"--output: there is no folder {output.parent}")


if __name__ == "__main__":
    typer.run(main)

"""The subcommands. Each is a function here that reads its options, and a module that does the work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from hyper_parallel.cli.description import Description, read_description
from hyper_parallel.cli.doctor.child import find_diagnostics
from hyper_parallel.cli.doctor.examination import examine
from hyper_parallel.cli.doctor.report import print_diagnosis
from hyper_parallel.cli.explain import explain
from hyper_parallel.cli.explanation import Explanation
from hyper_parallel.cli.fields import DescriptionError
from hyper_parallel.cli.report import print_explanation
from hyper_parallel.parity.command import mount as mount_parity

_WIDTH_OF_A_PIPE = 140

app = typer.Typer(
    name="hyper-parallel", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback()
def _root() -> None:
    """Gradient norms on any mix of parallelism."""


mount_parity(app)


@app.command("explain")
def explain_command(
    description: Annotated[Path, typer.Argument(help="A YAML description of the model and its meshes.")],
    rank: Annotated[int, typer.Option(min=0, help="The rank whose plan to explain.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw which rank holds and counts what: .png or .svg.")
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            help="A parameter of the picture, by its fqn; may be repeated. Default: one of each kind."
        ),
    ] = None,
) -> None:
    """Print the plan that clip_grad_norm_ would follow: parameters, collectives, bytes, warnings.

    Needs no accelerator, no framework and no other process, whatever the world size. pydoc
    hyper_parallel.cli.description shows how a description is written, pydoc hyper_parallel.cli.explanation
    the keys of the JSON.
    """
    try:
        described = read_description(description)
        described.check_rank(rank)
        explanation = _explained(described, rank)
        if picture is not None:
            from hyper_parallel.cli.picture import draw  # the import takes a second

            tensors, pipeline = described.tensors(rank), described.pipeline_mesh(rank)
            draw(picture, tensors, rank, parameter or (), pipeline)
    except DescriptionError as error:
        _fail(str(error))
    if as_json:
        typer.echo(json.dumps(explanation.as_json(), indent=2))
    else:
        print_explanation(explanation, _console(), str(description))
    if picture is not None:
        typer.echo(f"picture: {picture}", err=True)


def _explained(described: Description, rank: int) -> Explanation:
    return explain(
        described.tensors(rank),
        rank,
        described.groups(rank),
        described.pipeline_mesh(rank),
        itemsizes=described.itemsizes(rank),
        scalar_bytes=described.scalar_bytes,
        world_size=described.world_size,
    )


@app.command("doctor")
def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    platform: Annotated[
        list[str] | None, typer.Option(help="A platform to examine; may be repeated. Default: all.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one process to answer.")] = 120.0,
    no_collectives: Annotated[
        bool, typer.Option("--no-collectives", help="Try no collectives and no clipping.")
    ] = False,
) -> None:
    """Examine this machine: versions, devices, CANN, a tiny all-reduce and clip on each device; remedies.

    Exit status 0: no error (warnings alone do not count), 1: errors, 2: wrong usage. pydoc
    hyper_parallel.cli.doctor shows the keys of the JSON.
    """
    accepted = find_diagnostics()
    for name in platform or ():
        if name not in accepted:
            _fail(f"--platform {name}: accepted: {', '.join(sorted(accepted)) or 'none is registered'}")
    with Console(stderr=True).status("starting") as status:
        diagnosis = examine(
            tuple(dict.fromkeys(platform or ())),
            timeout=timeout,
            collectives=not no_collectives,
            progress=status.update,
        )
    if as_json:
        typer.echo(json.dumps(diagnosis.as_json(), indent=2))
    else:
        print_diagnosis(diagnosis, _console())
    raise typer.Exit(0 if diagnosis.healthy else 1)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH_OF_A_PIPE)


def _fail(message: str) -> NoReturn:
    typer.echo(f"hyper-parallel: {message}", err=True)
    raise typer.Exit(2)

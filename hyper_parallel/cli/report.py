"""Prints an explanation for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hyper_parallel.cli.explanation import Collective, Explanation, ParameterGroup, PartExplanation
from hyper_parallel.cli.names import bytes_name, ranks_name

_PURPOSES = {
    "agree": "do all ranks reduce the same gradients?",
    "flags": "which of the Partial gradients are there?",
    "bucket": "values of Partial gradients",
    "statistic": "the norm",
    "stages": "the norm, over the pipeline stages",
}


def print_explanation(explanation: Explanation, console: Console, title: str) -> None:
    """Print the parts, the collectives in the order in which they run, the totals and the warnings."""
    world = "" if explanation.world_size is None else f" of {explanation.world_size:,}"
    console.print(
        f"[bold]Gradient norm of {escape(title)}[/bold], as planned on rank {explanation.rank}{world}"
    )
    if not explanation.num_parameters:
        console.print("This rank holds no parameters.")
    for number, part in enumerate(explanation.parts, 1):
        if part.terms:
            console.print(_parameters(part, f"Part {number}: " if len(explanation.parts) > 1 else ""))
    if explanation.collectives:
        console.print(_collectives(explanation.collectives))
    _print_totals(explanation, console)
    for advice in explanation.warnings:
        style = "bold red" if advice.kind == "error" else "yellow"
        text = Text.assemble((f"{advice.kind.replace('_', ' ')}: ", style), advice.text)
        console.print(Padding(text, (0, 0, 0, 2)))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)


def _parameters(part: PartExplanation, prefix: str) -> Table:
    ranks = f"{part.holders:,} ranks" if part.holders > 1 else "this rank alone"
    if part.holders != part.num_ranks:
        ranks += f" of a pipeline stage, {part.num_ranks:,} in all"
    table = _table(f"{prefix}counted by {ranks}")
    table.add_column("parameters", overflow="fold")
    table.add_column("number", justify="right")
    table.add_column("global shape")
    table.add_column("placements", overflow="fold")
    table.add_column("elements on this rank", justify="right")
    table.add_column("copies of each piece", justify="right")
    for term in part.terms:
        for position, group in enumerate(term.groups):
            copies = f"{term.copies:,}" if position == 0 else '"'
            shared = f" (shared: {term.shared})" if term.shared else ""
            table.add_row(
                escape(group.name + shared),
                f"{group.count:,}",
                " x ".join(map(str, group.global_shape)) or "scalar",
                escape(placements_text(group)),
                f"{group.elements:,}",
                copies,
            )
        if term.partial:
            table.add_row(
                f"  reduced in {term.buckets:,} bucket{'s' * (term.buckets != 1)}, a slice for each rank",
                "", "", "", f"{term.elements_reduced:,}", "",
            )  # fmt: skip
    return table


def placements_text(group: ParameterGroup) -> str:
    """``dp=8: Shard(0), tp=4: Replicate()``."""
    if not group.placements:
        return "plain"
    return ", ".join(
        f"{name}={size}: {placement}"
        for (name, size), placement in zip(group.mesh_dims, group.placements, strict=True)
    )


def _collectives(collectives: Sequence[Collective]) -> Table:
    table = _table("Collectives of one step, in this order")
    table.add_column("collective")
    table.add_column("times", justify="right")
    table.add_column("ranks", overflow="fold")
    table.add_column("elements", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("for")
    for each in collectives:
        table.add_row(
            f"{each.op.replace('_', '-')} ({each.reduce_op})",
            f"{each.repeats:,}",
            f"{len(each.ranks):,}: {ranks_name(each.ranks)}",
            f"{each.elements:,}",
            bytes_name(each.num_bytes),
            _PURPOSES[each.purpose],
        )
    return table


def _print_totals(explanation: Explanation, console: Console) -> None:
    number = explanation.num_collectives
    read = "" if explanation.bytes_read is None else f" ({bytes_name(explanation.bytes_read)})"
    console.print(
        f"[bold]A step[/bold]: {number:,} collective{'s' * (number != 1)} of {bytes_name(explanation.num_bytes)} in "
        f"all; this rank reads {explanation.elements_read:,} elements{read} of "
        f"{explanation.num_parameters:,} parameters.",
        highlight=False,
    )
    if any(term.copies > 1 for part in explanation.parts for term in part.terms):
        console.print(
            "If only some copies of a gradient are there in a step, two more all-reduces find out which.",
            highlight=False,
        )

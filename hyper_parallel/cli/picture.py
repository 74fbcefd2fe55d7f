"""A picture of which rank holds and counts what: the ranks in their mesh, and the areas in the tensor.

Ranks that hold copies of an area have its colour. Along the first mesh dim that shards, the hue changes; along the
others, the lightness. The tensor is drawn as a square, whatever its shape; of more than two sharded dims, those
that are cut into most pieces are drawn.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from hyper_parallel.cli.fields import DescriptionError
from hyper_parallel.cli.held import Held, chosen_tensors, held_by
from hyper_parallel.cli.names import placement_name
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.plan import TensorMeta

FORMATS = (".png", ".svg")
MAX_RANKS = 64

_ROW_HEIGHT, _WIDTH, _DPI = 5.6, 12.4, 130
_EMPTY = "#f2f2f2"
_AREAS = "Areas of the tensor, and the ranks that hold them"
_MAX_STRIPS, _MAX_COLUMNS, _MAX_TICKS = 16, 16, 18
_SMALLEST_FONT, _LARGEST_FONT = 4.5, 14.0


def draw(
    path: Path,
    tensors: Sequence[TensorMeta],
    rank: int,
    names: Sequence[str] = (),
    pipeline: Mesh | None = None,
) -> None:
    """Draw some tensors below each other.

    Args:
        path: the file to write, .png or .svg.
        tensors, rank, pipeline: as for ``explain``; the stage of ``rank`` is drawn.
        names: which of the tensors; by default one of each kind, three at most.

    Raises:
        DescriptionError: another format, an unknown name, more than 64 ranks, or the file cannot be written.
    """
    if path.suffix.lower() not in FORMATS:
        raise DescriptionError(f"--picture {path}: accepted: {', '.join(FORMATS)}")
    shown = [held_by(meta, tensors, rank, pipeline) for meta in chosen_tensors(tensors, rank, names)]
    for held in shown:
        size = held.layout.mesh.size
        if size > MAX_RANKS:
            raise DescriptionError(
                f"--picture: {held.name} lies on {size:,} ranks; a picture is readable up to {MAX_RANKS}. Make the "
                "mesh dims of the description smaller: the pattern stays the same"
            )
    # No pyplot: its backends and its state belong to the program that calls.
    figure = Figure(figsize=(_WIDTH, _ROW_HEIGHT * len(shown)), dpi=_DPI)
    FigureCanvasAgg(figure)
    for row, held in enumerate(shown):
        _draw_row(figure, held, row, len(shown))
    try:
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "hyper_parallel"}):
            figure.savefig(path)
    except OSError as error:
        raise DescriptionError(f"--picture {path}: cannot be written: {error}") from error


def _draw_row(figure: Figure, held: Held, row: int, rows: int) -> None:
    height = 1 / rows
    bottom = 1 - (row + 1) * height
    title = _title(held)
    figure.text(
        0.035, bottom + 0.955 * height, title, fontsize=min(13, 1300 / len(title)), weight="bold", va="center"
    )
    figure.text(0.035, bottom + 0.905 * height, _summary(held), fontsize=10.5, va="center", color="#333333")
    left, span = bottom + 0.105 * height, 0.72 * height
    _draw_mesh(figure.add_axes((0.075, left, 0.40, span)), held)
    _draw_tensor(figure.add_axes((0.565, left, 0.40, span)), held)


def _title(held: Held) -> str:
    shape = " x ".join(map(str, held.layout.global_shape)) or "scalar"
    mesh = held.layout.mesh
    where = ", ".join(
        f"{name}={size}: {placement_name(placement)}"
        for name, size, placement in zip(held.dim_names, mesh.shape, held.layout.placements, strict=True)
    )
    return f"{held.name}  ({shape})   {where}"


def _summary(held: Held) -> str:
    number = held.layout.num_chunks
    pieces = "One piece" if number == 1 else f"{number} different pieces"
    if held.terms > 1:
        counts = (
            f"Partial: {held.terms} ranks hold a term each (joined by +); reduced, each counts 1/{held.terms}"
        )
        copies = f" of its piece, divided by {held.copies} copies" if held.copies > 1 else " of its piece"
        return f"{pieces}. {counts}{copies}."
    if held.copies == 1:
        return f"{pieces}, each on one rank, which counts all that it holds."
    return f"{pieces}, each on {held.copies} ranks (same colour): each rank counts 1/{held.copies} of what it holds."


def _draw_mesh(axes: Any, held: Held) -> None:
    """Ranks in mesh coordinates: the last dim to the right, all others downwards; a long last dim is broken."""
    mesh, names = held.layout.mesh, held.dim_names
    columns = _columns(mesh)
    rows, share = -(-mesh.size // columns), held.copies * held.terms
    for position, rank in enumerate(mesh.ranks):
        row, column = divmod(position, columns)
        color = _color(held, rank)
        _cell(axes, (column, row), (1, 1), color, hatched=held.terms > 1)
        note = ([f"1/{share}"] if share > 1 else []) if held.areas(rank) else ["empty"]
        options = [[str(rank), *note], [": ".join([str(rank), *note])]]
        text, size = _fitted(options, (1 / columns, 1 / rows), _LARGEST_FONT)
        _label(axes, (column + 0.5, row + 0.5), text, color, size)
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    axes.set_title("Ranks in the mesh" + (", and the share each counts" if share > 1 else ""), fontsize=11)
    axes.tick_params(length=0, labelsize=9)
    broken = columns != mesh.shape[-1]
    shown = names if broken else names[:-1]
    axes.set_xlabel(f"{names[-1]}, in several rows" if broken else names[-1], fontsize=11)
    axes.set_ylabel(" x ".join(shown) + (" of the first in a row" if broken else ""), fontsize=11)
    axes.set_xticks([] if broken else [column + 0.5 for column in range(columns)])
    if not broken:
        axes.set_xticklabels([str(column) for column in range(columns)])
    firsts = [mesh.coordinate(mesh.ranks[row * columns]) or () for row in range(rows)]
    axes.set_yticks(
        [row + 0.5 for row in range(rows)], [",".join(map(str, first[: len(shown)])) for first in firsts]
    )


def _columns(mesh: Mesh) -> int:
    """How many ranks stand in a row: those of the last dim, or a part of them."""
    last = mesh.shape[-1]
    if last <= _MAX_COLUMNS:
        return last
    return max((n for n in range(4, _MAX_COLUMNS // 2 + 1) if last % n == 0), default=_MAX_COLUMNS // 2)


def _draw_tensor(axes: Any, held: Held) -> None:
    """The areas, with the ranks that hold them."""
    blocks, (height, width) = held.blocks(), held.drawn_sizes
    axes.set_xlim(0, 1)
    axes.set_ylim(1, 0)
    axes.tick_params(length=2, labelsize=8)
    dims = ["" if dim is None else f"dim {dim}" for dim in held.drawn_dims]
    strips = held.strips
    if strips is not None and len(blocks) > _MAX_STRIPS:
        _draw_folded(axes, held, strips)
        return
    for start, extent, ranks in blocks:
        where, size = (start[1] / width, start[0] / height), (extent[1] / width, extent[0] / height)
        _draw_area(axes, held, where, size, ranks)
    behind = ", ".join(map(str, held.hidden_dims))
    title = f"Areas (dim {behind} is cut too: / joins areas behind each other)" if behind else _AREAS
    axes.set_title(title, fontsize=11)
    axes.set_ylabel(dims[0], fontsize=11)
    axes.set_xlabel(dims[1], fontsize=11)
    rows, columns = (_ticks(held, axis) for axis in (0, 1))
    axes.set_yticks([edge / height for edge in rows], list(map(str, rows)))
    axes.set_xticks([edge / width for edge in columns], list(map(str, columns)))
    axes.tick_params(axis="x", rotation=45 if len(columns) > 6 else 0)


def _ticks(held: Held, axis: int) -> Sequence[int]:
    if held.drawn_dims[axis] is None:
        return ()
    edges = held.edges(axis)
    return edges[:: -(-len(edges) // _MAX_TICKS)]


def _draw_folded(axes: Any, held: Held, axis: int) -> None:
    """Many strips along one dim, as equal cells in columns: to scale they would be too thin to read."""
    blocks = sorted(held.blocks(), key=lambda block: block[0][axis])
    columns = -(-len(blocks) // _MAX_STRIPS)
    rows = -(-len(blocks) // columns)
    for number, (start, extent, ranks) in enumerate(blocks):
        column, row = divmod(number, rows)
        where, size = (column / columns, row / rows), (1 / columns, 1 / rows)
        first, last = start[axis], start[axis] + extent[axis] - 1
        note = f"{first}:  " if first == last else f"{first}-{last}:  "
        _draw_area(axes, held, where, size, ranks, note)
    dim = held.drawn_dims[axis]
    axes.set_title(f"Areas of the tensor: indices of dim {dim}, and the ranks that hold them", fontsize=11)
    axes.set_xlabel(f"dim {dim}: downwards, then the next column", fontsize=11)
    axes.set_xticks([])
    axes.set_yticks([])


def _draw_area(
    axes: Any,
    held: Held,
    where: tuple[float, float],
    size: tuple[float, float],
    ranks: Sequence[int],
    note: str = "",
) -> None:
    color = _color(held, ranks[0])
    _cell(axes, where, size, color, hatched=held.terms > 1)
    words = held.words(ranks)
    options = []
    for number in range(1, len(words) + 1):
        per_line = -(-len(words) // number)
        lines = [" ".join(words[i : i + per_line]) for i in range(0, len(words), per_line)]
        options.append([note + lines[0], *lines[1:]])
    text, font = _fitted(options, size, _LARGEST_FONT)
    _label(axes, (where[0] + size[0] / 2, where[1] + size[1] / 2), text, color, font)


def _fitted(options: Sequence[Sequence[str]], size: tuple[float, float], largest: float) -> tuple[str, float]:
    """The first of several ways to break lines that can be set largest in a cell of a panel, and the font size."""
    best, found = 0.0, ""
    for lines in options:
        font = min(largest, 520 * size[0] / max(map(len, lines)), 205 * size[1] / len(lines))
        if font > best:
            best, found = font, "\n".join(lines)
    return found, max(best, _SMALLEST_FONT)


def _cell(axes: Any, where: Any, size: Any, color: Any, hatched: bool) -> None:
    hatch = "///" if hatched else None
    axes.add_patch(
        Rectangle(where, *size, facecolor=color, edgecolor=(1, 1, 1, 0.9), linewidth=1.2, hatch=hatch)
    )


def _label(axes: Any, where: tuple[float, float], text: str, color: Any, size: float) -> None:
    axes.text(*where, text, ha="center", va="center", fontsize=size, color=_ink(color), linespacing=1.1)


def _color(held: Held, rank: int) -> Any:
    if not held.areas(rank):
        return _EMPTY
    here = held.layout.mesh.coordinate(rank) or ()
    dims = held.layout.shard_dims
    if not dims:
        return (0.62, 0.74, 0.88)
    first, others = dims[0], dims[1:]
    index = 0
    for dim in others:
        index = index * held.layout.mesh.shape[dim] + here[dim]
    steps = prod(held.layout.mesh.shape[dim] for dim in others)
    hue = (0.58 + here[first] / held.layout.mesh.shape[first]) % 1.0
    lightness = 0.72 if steps == 1 else 0.86 - 0.46 * index / (steps - 1)
    return colorsys.hls_to_rgb(hue, lightness, 0.55)


def _ink(color: Any) -> str:
    if isinstance(color, str):
        return "#888888"
    red, green, blue = color
    return "#111111" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.48 else "white"

"""Measures the coverage check on simulated ranks, without processes: the sweep of gathered tables, and layouts.

``python benchmarks/coverage.py``. Every entry of a table is made of objects of its own, as tables are after a gather.
Parameters repeat the shapes of a dozen, or are all different. Mosaics are no grids, and each is another one, so that no
shortcut applies. The last tables are wrong. ``pairs`` is not measured in full: the time of one pair among 128 shards,
times the pairs of distinct areas. Times are CPU time of the thread, so that other processes count less.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hyper_parallel.core.coverage import LocalShard, check_coverage, layout_copies, layout_digest
from hyper_parallel.core.layout import Area, Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.plan import TensorMeta

SHAPES = 12
"""Different shapes in a model that repeats its layers."""

PAIRED = 128
"""Shards that are compared in pairs."""

Spans = tuple[tuple[int, int], ...]
Tables = dict[int, dict[str, LocalShard]]

SWEPT: dict[str, tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]] = {
    "FSDP": ((-1,), (Shard(0),), (5000, 64)),
    "FSDP over TP, strided": ((-1, 8), (StridedShard(0, split_factor=8), Shard(0)), (5000, 64)),
    "HSDP, 4 copies": ((4, -1), (Replicate(), Shard(0)), (5000, 64)),
    "EP x FSDP, 8 copies": ((8, -1, 8), (Shard(0), Shard(1), Replicate()), (60, 1000, 64)),
}
"""Mesh (-1: what is left), placements and global shape; all uneven."""

ANALYTIC: dict[str, tuple[tuple[int, ...], tuple[tuple[Placement, ...], ...]]] = {
    "FSDP": ((-1,), ((Shard(0),),)),
    "FSDP over TP": (
        (-1, 8),
        (
            (StridedShard(0, split_factor=8), Shard(0)),
            (Shard(0), Shard(1)),
            (Shard(0), Replicate()),
            (Replicate(), Replicate()),
        ),
    ),
    "EP x FSDP x TP": (
        (16, -1, 8),
        (
            (Shard(0), Shard(1), Shard(2)),
            (Shard(0), Shard(0), Replicate()),
            (Replicate(), StridedShard(0, split_factor=8), Shard(0)),
            (Replicate(), Shard(0), Replicate()),
        ),
    ),
}


def _mesh(shape: tuple[int, ...], world_size: int) -> Mesh:
    known = 1
    for size in shape:
        known *= max(size, 1)
    return Mesh(tuple(world_size // known if size < 0 else size for size in shape), tuple(range(world_size)))


def _entry(shape: tuple[int, ...], areas: tuple[Area, ...], last: int) -> LocalShard:
    """A copy in new objects, whose last dim, which no placement cuts, is ``last``."""
    copies = [Area((*area.offsets,), (*area.sizes[:-1], last)) for area in areas]
    return LocalShard((*shape[:-1], last), tuple(copies))


def laid_out(case: str, parameters: int, world_size: int, shapes: int) -> Tables:
    """The tables of ``parameters`` laid out alike, of as many different ``shapes``."""
    mesh_shape, placements, shape = SWEPT[case]
    layout = Layout(_mesh(mesh_shape, world_size), placements, shape)
    areas = {rank: layout.areas(rank) for rank in layout.mesh.ranks}
    return {
        rank: {f"p{number}": _entry(shape, held, 64 + number % shapes) for number in range(parameters)}
        for rank, held in areas.items()
    }


def _mosaic(cell: Spans, number: int, rng: random.Random) -> list[Spans]:
    """About ``number`` boxes that tile ``cell``; each is cut on its own, at random, so they are no grid."""
    dim = max(range(len(cell)), key=lambda d: (cell[d][1] - cell[d][0]) * rng.uniform(0.5, 1))
    start, stop = cell[dim]
    if number == 1 or stop - start < 2:
        return [cell]
    first = max(1, min(number - 1, int(number * rng.uniform(0.3, 0.7))))
    cut = max(start + 1, min(stop - 1, start + (stop - start) * first // number + rng.randint(-3, 3)))
    parts = (((start, cut), first), ((cut, stop), number - first))
    return [b for span, n in parts for b in _mosaic((*cell[:dim], span, *cell[dim + 1 :]), n, rng)]


def mosaics(ndim: int, parameters: int, world_size: int) -> Tables:
    """Tables in which every parameter is another mosaic, dealt to the ranks at random."""
    rng, shape = random.Random(0), (8192 >> ndim,) * ndim
    tables: Tables = {rank: {} for rank in range(world_size)}
    for number in range(parameters):
        boxes = _mosaic(tuple((0, size) for size in shape), world_size, rng)
        rng.shuffle(boxes)
        for rank, table in tables.items():
            box = boxes[rank : rank + 1]
            areas = [Area(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)) for spans in box]
            table[f"p{number}"] = LocalShard(shape, tuple(areas))
    return tables


def disagreeing(parameters: int, world_size: int, shapes: int) -> Tables:
    """FSDP by dim 0 on one half of the ranks and by dim 1 on the other: each shard overlaps half of all others."""
    tables = laid_out("FSDP", parameters, world_size, shapes)
    layout = Layout(_mesh((-1,), world_size), (Shard(1),), (64, 5000))
    for rank in range(world_size // 2, world_size):
        areas = [Area(area.offsets, (5000, area.sizes[1])) for area in layout.areas(rank)]
        tables[rank] = {fqn: replace(entry, areas=tuple(areas)) for fqn, entry in tables[rank].items()}
    return tables


def compare_pairs(shards: Mapping[int, LocalShard]) -> bool:
    """What the sweep replaces: whether any two shards share elements."""
    areas = [area for shard in shards.values() for area in shard.areas]
    return any(
        all(
            max(a, b) < min(a + m, b + n)
            for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
        )
        for index, one in enumerate(areas)
        for other in areas[:index]
    )


def _seconds(call: Callable[[], object], rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        gc.collect()
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return times


def _spread(values: list[float], unit: float = 1) -> str:
    return f"{statistics.median(values) / unit:.2f} ({min(values) / unit:.2f} to {max(values) / unit:.2f})"


def _pair_seconds(rounds: int) -> float:
    """Seconds that a pair of disjoint areas takes."""
    shards = {rank: table["p0"] for rank, table in mosaics(2, 1, PAIRED).items()}
    times = _seconds(partial(compare_pairs, shards), max(rounds, 5))
    return statistics.median(times) / (PAIRED * (PAIRED - 1) / 2)


def _swept(parameters: int, world_size: int, rounds: int) -> Table:
    table = Table(title=f"{parameters:,} parameters on {world_size:,} ranks, gathered tables, seconds")
    for column in ("tables", "distinct", "sweep", "pairs", "pairs / sweep"):
        table.add_column(column, justify="left" if column == "tables" else "right", no_wrap=True)
    pair_seconds = _pair_seconds(rounds)
    few = max(1, parameters // 10)
    cases: list[tuple[str, int, Callable[[], Tables]]] = [
        (case, shapes, partial(laid_out, case, parameters, world_size, shapes))
        for shapes in (SHAPES, parameters)
        for case in SWEPT
    ]
    cases += [(f"mosaics in {ndim} dims", few, partial(mosaics, ndim, few, world_size)) for ndim in (2, 3)]
    cases.append(("FSDP by dim 0 and by dim 1", SHAPES, partial(disagreeing, parameters, world_size, SHAPES)))
    for label, distinct, build in cases:
        tables = build()
        distinct_shards = check_coverage({rank: {"p0": t["p0"]} for rank, t in tables.items()}, tables)[0][
            "p0"
        ]
        count = sum(len(copies.areas) for copies in distinct_shards)
        # Mosaics are swept one by one, so a tenth of them tells what all take.
        scale = parameters / len(tables[0])
        times = [scale * t for t in _seconds(partial(check_coverage, tables, tables), rounds)]
        pairs = pair_seconds * count * (count - 1) / 2 * parameters
        ratio = pairs / statistics.median(times)
        table.add_row(label, f"{distinct * scale:.0f}", _spread(times), f"{pairs:,.1f}", f"{ratio:,.0f}")
    return table


def _analytic(parameters: int, world_size: int, rounds: int) -> Table:
    table = Table(title=f"{parameters:,} parameters on {world_size:,} ranks, from layouts, milliseconds")
    for column in ("layouts", "mesh", "digest", "copies", "both"):
        table.add_column(column, justify="left" if column == "layouts" else "right", no_wrap=True)
    for label, (mesh_shape, placements) in ANALYTIC.items():
        mesh = _mesh(mesh_shape, world_size)
        shapes = [(5000 + 7 * number, 3001 + number, 1001 + number) for number in range(parameters)]
        layouts = [Layout(mesh, placements[i % len(placements)], shape) for i, shape in enumerate(shapes)]
        tensors = [TensorMeta(f"p{i}", x.global_shape, x) for i, x in enumerate(layouts)]
        digest = _seconds(partial(layout_digest, tensors, mesh.ranks), max(rounds, 9))
        copies = _seconds(partial(layout_copies, layouts), max(rounds, 9))
        both = [a + b for a, b in zip(digest, copies, strict=True)]
        table.add_row(label, str(mesh.shape), *(_spread(times, 1e-3) for times in (digest, copies, both)))
    return table


def main(
    parameters: Annotated[int, typer.Option(help="Parameters of the simulated model.")] = 1000,
    world_size: Annotated[int, typer.Option(help="Ranks whose tables are swept, a multiple of 64.")] = 1024,
    analytic_world_size: Annotated[
        int, typer.Option(help="Ranks of the layouts, a multiple of 128.")
    ] = 16384,
    rounds: Annotated[int, typer.Option(help="Calls of each kind.")] = 5,
) -> None:
    """Print medians, spreads (lowest to highest) and ratios."""
    Console().print(_analytic(parameters, analytic_world_size, rounds))
    Console().print(_swept(parameters, world_size, rounds))


if __name__ == "__main__":
    typer.run(main)

"""Measures the coverage check on simulated ranks, without processes: of gathered tables, and of layouts.

``python benchmarks/coverage.py``. Tables are made of objects of their own, as they are once received; "read" is what it
takes to make them of what travels. Parameters repeat the shapes of a dozen, or no two are alike in any dim. Mosaics are
no grids, and each is another one, so that no shortcut applies. The last tables are wrong. ``pairs`` is not measured in
full: the time of one pair among 128 shards, times the pairs of distinct areas.

From layouts, it is ``build_norm_shard_plan(..., trust_layouts=True)`` itself on torch, as one rank of a job whose other
ranks agree: torch's process group for tests communicates with nobody. Each round has a mesh of its own, so that nothing
is known from the round before. Times are CPU time of the thread, so that other processes count less.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table as Printed
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import hyper_parallel
from hyper_parallel.core.coverage import LocalShard, Table, check_coverage, unpack_areas
from hyper_parallel.core.layout import Area, Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Placement, Replicate, Shard, StridedShard

SHAPES = 12
"""Different shapes in a model that repeats its layers."""

PAIRED = 128
"""Shards that are compared in pairs."""

Spans = tuple[tuple[int, int], ...]
Sent = dict[int, bytes]

SWEPT: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "FSDP": ((-1,), (Shard(0),)),
    "FSDP over TP, strided": ((-1, 8), (StridedShard(0, split_factor=8), Shard(0))),
    "FSDP x TP": ((-1, 8), (Shard(0), Shard(1))),
    "EP x FSDP x TP": ((16, -1, 8), (Shard(0), Shard(1), Shard(2))),
    "HSDP, 4 copies": ((4, -1), (Replicate(), Shard(0))),
    "EP x FSDP, 8 copies": ((8, -1, 8), (Shard(0), Shard(1), Replicate())),
}
"""Mesh (-1: what is left) and placements."""

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


def _mesh_shape(shape: tuple[int, ...], world_size: int) -> tuple[int, ...]:
    known = -prod(shape) if -1 in shape else prod(shape)
    return tuple(world_size // known if size < 0 else size for size in shape)


def _shapes(parameters: int, different: int) -> list[tuple[int, int, int]]:
    """Uneven shapes, of which no two of the ``different`` ones share a size."""
    return [
        (5000 + 7 * (i % different), 3001 + i % different, 1001 + i % different) for i in range(parameters)
    ]


def laid_out(case: str, parameters: int, world_size: int, different: int) -> Sent:
    """The tables of ``parameters`` laid out alike."""
    mesh_shape, placements = SWEPT[case]
    mesh = Mesh(_mesh_shape(mesh_shape, world_size), tuple(range(world_size)))
    shapes = _shapes(parameters, different)
    layouts = {shape: Layout(mesh, placements, shape) for shape in dict.fromkeys(shapes)}
    sent = {}
    for rank in mesh.ranks:
        shards = {shape: LocalShard(shape, layout.areas(rank)) for shape, layout in layouts.items()}
        sent[rank] = Table.of({_name(i): shards[shape] for i, shape in enumerate(shapes)}).sent()
    return sent


def _name(number: int) -> str:
    return f"model.layers.{number // 10}.weight_{number % 10}"


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


def mosaics(ndim: int, parameters: int, world_size: int) -> Sent:
    """Tables in which every parameter is another mosaic, dealt to the ranks at random."""
    rng, shape = random.Random(0), (8192 >> ndim,) * ndim
    shards: dict[int, dict[str, LocalShard]] = {rank: {} for rank in range(world_size)}
    for number in range(parameters):
        boxes = _mosaic(tuple((0, size) for size in shape), world_size, rng)
        rng.shuffle(boxes)
        for rank, held in shards.items():
            box = boxes[rank : rank + 1]
            areas = [Area(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)) for spans in box]
            held[_name(number)] = LocalShard(shape, tuple(areas))
    return {rank: Table.of(held).sent() for rank, held in shards.items()}


def shifted(case: str, parameters: int, world_size: int) -> Sent:
    """One rank holds the shards of its neighbour: as many holes as parameters."""
    sent = laid_out(case, parameters, world_size, parameters)
    return {**sent, 1: sent[2]}


def disagreeing(parameters: int, world_size: int, different: int) -> Sent:
    """FSDP by dim 0 on one half of the ranks and by dim 1 on the other: each shard overlaps half of all others."""
    sent = laid_out("FSDP", parameters, world_size, different)
    mesh = Mesh((world_size,), tuple(range(world_size)))
    for rank in range(world_size // 2, world_size):
        shapes = _shapes(parameters, different)
        areas = {shape: Layout(mesh, (Shard(1),), shape).areas(rank) for shape in dict.fromkeys(shapes)}
        shards = {_name(i): LocalShard(shape, areas[shape]) for i, shape in enumerate(shapes)}
        sent[rank] = Table.of(shards).sent()
    return sent


def compare_pairs(areas: list[Area]) -> bool:
    """What the check replaces: whether any two areas share elements."""
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


def _distinct(sent: Sent) -> list[Area]:
    """The distinct areas of the first parameter."""
    records = {Table.received(data).records[0] for data in sent.values()}
    return [area for record in records for area in unpack_areas(record)]


def _pair_seconds(rounds: int) -> float:
    """Seconds that a pair of disjoint areas takes."""
    areas = _distinct(mosaics(2, 1, PAIRED))
    return statistics.median(_seconds(partial(compare_pairs, areas), max(rounds, 5))) / (
        len(areas) * (len(areas) - 1) / 2
    )


def _gathered(parameters: int, world_size: int, rounds: int) -> Printed:
    table = Printed(title=f"{parameters:,} parameters on {world_size:,} ranks, gathered tables, seconds")
    for column in ("tables", "distinct", "KB a rank", "read", "check", "pairs", "pairs / check"):
        table.add_column(column, justify="left" if column == "tables" else "right", no_wrap=True)
    pair_seconds, few = _pair_seconds(rounds), max(1, parameters // 10)
    cases: list[tuple[str, int, Callable[[], Sent]]] = [
        (case, different, partial(laid_out, case, parameters, world_size, different))
        for different in (SHAPES, parameters)
        for case in SWEPT
    ]
    cases += [(f"mosaics in {ndim} dims", few, partial(mosaics, ndim, few, world_size)) for ndim in (2, 3)]
    cases.append(("FSDP, one rank wrong", parameters, partial(shifted, "FSDP", parameters, world_size)))
    cases.append(
        ("FSDP x TP, one rank wrong", parameters, partial(shifted, "FSDP x TP", parameters, world_size))
    )
    cases.append(("FSDP by dim 0 and by dim 1", SHAPES, partial(disagreeing, parameters, world_size, SHAPES)))
    for label, different, build in cases:
        sent = build()
        tables = {rank: Table.received(data) for rank, data in sent.items()}
        # Mosaics are checked one by one, so a tenth of them tells what all take.
        scale, count = parameters / len(tables[0].fqns), len(_distinct(sent))
        read = _seconds(lambda: [Table.received(data) for data in sent.values()], 1)  # noqa: B023
        times = [scale * t for t in _seconds(partial(check_coverage, tables, tables), rounds)]
        pairs = pair_seconds * count * (count - 1) / 2 * parameters
        ratio = pairs / statistics.median(times)
        size = scale * sum(map(len, sent.values())) / len(sent) / 1024
        cells = f"{size:.1f}", f"{scale * read[0]:.2f}", _spread(times), f"{pairs:,.0f}", f"{ratio:,.0f}"
        table.add_row(label, f"{different * scale:.0f}", *cells)
    return table


def _model(case: str, parameters: int, turn: int) -> torch.nn.Module:
    """A model of parameters that take no memory, on a mesh whose ranks are turned by ``turn``."""
    mesh_shape, placements = ANALYTIC[case]
    world = torch.arange(dist.get_world_size()).roll(turn)
    mesh = DeviceMesh("cpu", world.reshape(_mesh_shape(mesh_shape, len(world))))
    model, core = torch.nn.Module(), hyper_parallel.get_platform().mesh(mesh)
    for index, shape in enumerate(_shapes(parameters, parameters)):
        layout = Layout(core, placements[index % len(placements)], shape)
        local = torch.zeros(1).expand(layout.local_shape(dist.get_rank()))
        parameter = hyper_parallel.DTensor.from_local(local, mesh, layout.placements, shape=shape)
        model.register_parameter(f"weight_{index}", torch.nn.Parameter(parameter))
    return model


def _analytic(parameters: int, world_size: int, rounds: int) -> Printed:
    table = Printed(title=f"{parameters:,} parameters on {world_size:,} ranks, from layouts, milliseconds")
    for column in ("layouts", "mesh", "first call", "later calls"):
        table.add_column(column, justify="left" if column == "layouts" else "right", no_wrap=True)
    dist.init_process_group("cpu:fake", rank=world_size // 2 + 1, world_size=world_size, store=FakeStore())
    build = partial(hyper_parallel.build_norm_shard_plan, trust_layouts=True)
    turn = 0
    for label in ANALYTIC:
        first, later = [], []
        build(_model(label, 10, turn))
        for _ in range(rounds):
            turn += 1
            model = _model(label, parameters, turn)
            whole = _seconds(partial(build, model), 3)
            first.append(whole[0])
            later += whole[1:]
        mesh = str(_mesh_shape(ANALYTIC[label][0], world_size))
        table.add_row(label, mesh, *(_spread(times, 1e-3) for times in (first, later)))
    dist.destroy_process_group()
    return table


def main(
    parameters: Annotated[int, typer.Option(help="Parameters of the simulated model.")] = 1000,
    world_size: Annotated[
        int, typer.Option(help="Ranks whose tables are checked, a multiple of 128.")
    ] = 1024,
    analytic_world_size: Annotated[
        int, typer.Option(help="Ranks of the layouts, a multiple of 128.")
    ] = 16384,
    rounds: Annotated[int, typer.Option(help="Calls of each kind.")] = 5,
) -> None:
    """Print medians, spreads (lowest to highest) and ratios."""
    console = Console(width=120)
    console.print(_analytic(parameters, analytic_world_size, rounds))
    console.print(_gathered(parameters, world_size, rounds))


if __name__ == "__main__":
    typer.run(main)

"""Exact cover: every element of a global tensor is held by exactly one distinct shard; equal shards are copies.

Gathered tables are not trusted. Comparing n shards in pairs takes n**2 / 2 steps a parameter, hours on a large job.
Here parameters with equal tables are checked once, and the n blocks of what is left, in d dims, are

1. a grid, nearly always: n distinct blocks, each a product of intervals that tile their dim, out of a grid of n,
   are that grid. Sets of intervals decide it in O(d n log n).
2. else swept: space is cut wherever no block is cut and, which keeps the depth at O(d log n), at the median edge,
   until each block spans its cell in all dims but one. Such slabs are sorted and swept along that dim: O(n log(n)**2)
   while a cut meets few blocks, about n**2 if many cross everywhere (rods, random overlaps).

Layouts need no sweep, as placements cut every dim into intervals that tile it. But ranks may disagree, which a digest
shows. Who holds copies follows from the mesh and its sharded dims alone, in O(ranks).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, permutations, product
from math import prod
from operator import attrgetter, ne
from typing import TypeAlias, TypeVar

from hyper_parallel.core.layout import Area, Interval, Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.plan import TensorMeta, digest_bits
from hyper_parallel.core.union import Ranks

Shape: TypeAlias = tuple[int, ...]
Areas: TypeAlias = tuple[Area, ...]
Spans: TypeAlias = tuple[Interval, ...]
Box: TypeAlias = tuple[Spans, int]
Key = TypeVar("Key", bound=Hashable)

PRINTED = 5


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What one rank says of one parameter. ``problem`` is what it found wrong by itself, in words."""

    global_shape: tuple[int, ...]
    areas: Areas
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ShardCopies:
    """A distinct shard (its areas that have elements) and the ranks that hold it; the first, smallest, represents it."""

    areas: Areas
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class CoverageError:
    """``kind`` is ranks, fqns, local, shapes, bounds, overlap or hole; ``fqn`` is empty for a rank as a whole."""

    kind: str
    ranks: Ranks
    reason: str
    areas: Areas = ()
    fqn: str = ""


Shards: TypeAlias = dict[str, tuple[ShardCopies, ...]]
Tables: TypeAlias = Mapping[int, Mapping[str, LocalShard]]


def verify_coverage(tables: Tables, ranks: Collection[int]) -> Shards:
    """The distinct shards of every FQN, from the tables (by rank and FQN) of ``ranks``, a pipeline stage.

    Raises:
        ValueError: they do not cover their tensors exactly; it prints at most ``PRINTED`` errors of a kind.
    """
    shards, errors = check_coverage(tables, ranks)
    if not errors:
        return shards
    lines = [f"the shards do not cover their tensors exactly; {len(errors)} errors:"]
    for kind, same in groupby(sorted(errors, key=attrgetter("kind")), attrgetter("kind")):
        texts = [error.reason for error in same]
        lines += texts[:PRINTED]
        if len(texts) > PRINTED:
            lines.append(f"and {len(texts) - PRINTED} more errors of kind {kind}")
    raise ValueError("\n  ".join(lines))


def check_coverage(tables: Tables, ranks: Collection[int]) -> tuple[Shards, tuple[CoverageError, ...]]:
    """What ``verify_coverage`` returns, and all errors, in O(entries) plus a sweep for each distinct parameter."""
    errors = []
    for rank in sorted(set(tables).symmetric_difference(ranks)):
        what = "outside" if rank in tables else "without a table, but a member"
        errors.append(
            CoverageError("ranks", (rank,), f"rank {rank} is {what} of the stage of {_text(ranks)}")
        )
    holders = sorted(set(ranks).intersection(tables))
    offsets, sizes = attrgetter("offsets"), attrgetter("sizes")
    known: dict[Hashable, LocalShard] = {}
    columns: dict[str, dict[int, LocalShard]] = {}
    for rank in holders:
        for fqn, entry in tables[rank].items():
            # Plain tuples hash and compare several times faster than dataclasses.
            key = entry.global_shape, entry.problem, *map(offsets, entry.areas), *map(sizes, entry.areas)
            columns.setdefault(fqn, {})[rank] = known.setdefault(key, entry)
    shards: Shards = {}
    seen: dict[Hashable, tuple[tuple[ShardCopies, ...], tuple[CoverageError, ...]]] = {}
    for fqn, column in columns.items():
        pattern = tuple(column), tuple(map(id, column.values()))
        if pattern not in seen:
            seen[pattern] = _check(column)
        shards[fqn], found = seen[pattern]
        errors += [replace(error, fqn=fqn, reason=f"{fqn}: {error.reason}") for error in found]
        if lacking := sorted(set(holders).difference(column) if len(column) < len(holders) else ()):
            reason = f"{fqn}: missing on {_text(lacking)}, present on {_text(column)} of the same stage"
            errors.append(CoverageError("fqns", tuple(lacking), reason, fqn=fqn))
    return shards, tuple(errors)


def local_shard(layout: Layout, rank: int) -> LocalShard:
    """What ``rank`` holds according to ``layout``; to be outside of its mesh is a problem."""
    if layout.mesh.coordinate(rank) is None:
        return LocalShard(layout.global_shape, (), f"outside of its mesh of {_text(layout.mesh.ranks)}")
    return LocalShard(layout.global_shape, layout.areas(rank))


def layout_copies(layouts: Sequence[Layout]) -> list[tuple[Ranks, ...]]:
    """For each layout, in the order of ``Layout.chunk``, the ranks that hold the chunk; the first represents them.

    O(ranks) for each distinct mesh with the same sharded dims, O(1) for any other layout. Empty chunks count apart.
    """
    meshes = _distinct_meshes(layouts)
    keys = [(id(meshes[id(layout.mesh)]), layout.shard_dims) for layout in layouts]
    distinct = dict(zip(keys, layouts, strict=True))
    found = {key: _chunk_ranks(layout.mesh, key[1]) for key, layout in distinct.items()}
    return [found[key] for key in keys]


def layout_digest(tensors: Sequence[TensorMeta], ranks: Collection[int]) -> int:
    """A number of ``DIGEST_BITS`` bits; if it is equal on all ``ranks``, their layouts agree and hence cover exactly.

    Of a mesh smaller than the stage its steps in its root go in. Without a root its sisters remain unknown.

    Raises:
        ValueError: a mesh has ranks outside of ``ranks``.
    """
    meshes = _distinct_meshes(meta.layout for meta in tensors if meta.layout is not None)
    places: dict[int, int] = {}
    for mesh in {id(mesh): mesh for mesh in meshes.values()}.values():
        if outside := set(mesh.ranks).difference(ranks):
            raise ValueError(f"a mesh has {_text(outside)}, outside of the stage of {_text(ranks)}")
        root = mesh.root or mesh
        number = {rank: number for number, rank in enumerate(root.ranks)}
        steps = [number[rank] - number[mesh.ranks[0]] for rank in mesh.ranks]
        shared = root.ranks if root is not mesh or mesh.size == len(ranks) else None
        places[id(mesh)] = digest_bits(f"{root.shape} {shared} {steps}")
    lines = (f"{m} {m.layout and places[id(meshes[id(m.layout.mesh)])]}" for m in tensors)
    return digest_bits("\n".join([str(sorted(ranks)), *lines]))


def _distinct_meshes(layouts: Iterable[Layout]) -> dict[int, Mesh]:
    """By the id of each mesh, one of those equal to it: to hash a mesh takes O(ranks)."""
    distinct: dict[Mesh, Mesh] = {}
    meshes = {id(layout.mesh): layout.mesh for layout in layouts}
    return {key: distinct.setdefault(mesh, mesh) for key, mesh in meshes.items()}


def _chunk_ranks(mesh: Mesh, shard_dims: tuple[int, ...]) -> tuple[Ranks, ...]:
    strides = [prod(mesh.shape[d + 1 :]) for d in range(mesh.ndim)]
    spans = [range(0, size * stride, stride) for size, stride in zip(mesh.shape, strides, strict=True)]
    along = [sum(steps) for steps in product(*(spans[d] for d in range(mesh.ndim) if d not in shard_dims))]
    firsts = (sum(steps) for steps in product(*(spans[d] for d in shard_dims)))
    return tuple(tuple(sorted([mesh.ranks[first + step] for step in along])) for first in firsts)


def _grouped(keys: Iterable[Key], ranks: Ranks) -> dict[Key, Ranks]:
    groups: dict[Key, list[int]] = {}
    for key, rank in zip(keys, ranks, strict=True):
        groups.setdefault(key, []).append(rank)
    return {key: tuple(group) for key, group in groups.items()}


def _check(column: Mapping[int, LocalShard]) -> tuple[tuple[ShardCopies, ...], tuple[CoverageError, ...]]:
    """The shards of one parameter, and its errors, which still lack its name."""
    ranks, errors = tuple(column), []
    held = _grouped([tuple([a for a in entry.areas if 0 not in a.sizes]) for entry in column.values()], ranks)
    problems = {rank: entry.problem for rank, entry in column.items() if entry.problem is not None}
    for problem, those in _grouped(problems.values(), tuple(problems)).items():
        errors.append(CoverageError("local", those, f"{_text(those)}: {problem}"))
    shapes = _grouped([entry.global_shape for entry in column.values()], ranks)
    shape = next(iter(shapes))
    if len(shapes) > 1 or min(shape, default=0) < 0:
        text = ", ".join(f"{shape} on {_text(those)}" for shape, those in shapes.items())
        errors.append(CoverageError("shapes", ranks, f"global shape {text}; areas are not compared"))
    elif not _is_grid(shape, list(chain.from_iterable(held))):
        # A rank with a problem may not know what it holds.
        errors += [e for e in _cover_errors(shape, held, ranks) if not problems or e.kind != "hole"]
    return tuple(ShardCopies(areas, those) for areas, those in held.items()), tuple(errors)


def _is_grid(shape: Shape, areas: Sequence[Area]) -> bool:
    blocks = {(area.offsets, area.sizes) for area in areas}
    if not blocks or {len(point) for block in blocks for point in block} != {len(shape)}:
        return not areas and 0 in shape
    offsets, sizes = zip(*blocks, strict=True)
    number = 1
    for end, starts, lengths in zip(shape, zip(*offsets, strict=True), zip(*sizes, strict=True), strict=True):
        intervals = sorted(set(zip(starts, lengths, strict=True)))
        stops = [start + length for start, length in intervals]
        if [start for start, _ in intervals] + [end] != [0, *stops] or min(lengths) < 0:
            return False
        number *= len(intervals)
    return number == len(areas) == len(blocks)


def _cover_errors(shape: Shape, held: Mapping[Areas, Ranks], ranks: Ranks) -> Iterator[CoverageError]:
    """Areas outside of ``shape`` (what lies inside still counts), overlaps, and what is missing."""
    owners = [(area, those) for areas, those in held.items() for area in areas]
    boxes: list[Box] = []
    for number, (area, those) in enumerate(owners):
        spans = tuple((o, o + size) for o, size in zip(area.offsets, area.sizes, strict=False))
        inside = tuple((max(a, 0), min(b, end)) for (a, b), end in zip(spans, shape, strict=False))
        fits = len(area.offsets) == len(area.sizes) == len(shape)
        if not fits or inside != spans or min(area.sizes, default=0) < 0:
            reason = f"{area} on {_text(those)} lies outside of the global shape {shape}"
            yield CoverageError("bounds", those, reason, (area,))
        if fits and all(start < stop for start, stop in inside):
            boxes.append((inside, number))
    met: dict[int, int] = {}
    missing, hole = _sweep(tuple((0, size) for size in shape), boxes, met)
    for pair in sorted({(min(pair), max(pair)) for pair in met.items()}):
        (one, those), (other, others) = owners[pair[0]], owners[pair[1]]
        reason = f"{one} on {_text(those)} overlaps {other} on {_text(others)}"
        yield CoverageError("overlap", tuple(sorted({*those, *others})), reason, (one, other))
    if hole is not None:
        area = Area(tuple(start for start, _ in hole), tuple(stop - start for start, stop in hole))
        reason = f"{missing} of {prod(shape)} elements are missing on {_text(ranks)}, among them {area}"
        yield CoverageError("hole", ranks, reason, (area,))


def _sweep(cell: Spans, boxes: Sequence[Box], met: dict[int, int]) -> tuple[int, Spans | None]:
    """How much of ``cell`` is in no box, and where some is; ``met`` gives each box that meets others one of these."""
    loose = [sum(map(ne, spans, cell)) for spans, _ in boxes]
    if 0 in loose:
        full = boxes[loose.index(0)][1]
        for number in (number for _, number in boxes if number != full):
            met[full], met[number] = number, full
        return 0, None
    crossing = [spans for (spans, _), dims in zip(boxes, loose, strict=True) if dims > 1]
    if not crossing:
        return _sweep_slabs(cell, boxes, met)
    ways = []
    for dim, ends in enumerate(cell):
        edges = sorted(edge for spans in crossing for edge in spans[dim] if edge not in ends)
        ordered = sorted(spans[dim] for spans, _ in boxes)
        reach = accumulate((stop for _, stop in ordered), max)
        free = {start for (start, _), far in zip(ordered[1:], reach, strict=False) if start >= far}
        ways.append((len(free), len(edges), dim, sorted({*free, *edges[len(edges) // 2 :][:1]})))
    *_, dim, cuts = max(ways)
    starts, stops = [cell[dim][0], *cuts], [*cuts, cell[dim][1]]
    inside: list[list[Box]] = [[] for _ in starts]
    for spans, number in boxes:
        start, stop = spans[dim]
        for part in range(bisect_right(stops, start), bisect_left(starts, stop)):
            span = max(start, starts[part]), min(stop, stops[part])
            inside[part].append(((*spans[:dim], span, *spans[dim + 1 :]), number))
    missing, hole = 0, None
    for start, stop, some in zip(starts, stops, inside, strict=True):
        more, where = _sweep((*cell[:dim], (start, stop), *cell[dim + 1 :]), some, met)
        missing, hole = missing + more, hole or where
    return missing, hole


def _sweep_slabs(cell: Spans, boxes: Sequence[Box], met: dict[int, int]) -> tuple[int, Spans | None]:
    """``_sweep`` for boxes that are loose in one dim, where each meets the one that reaches farthest before it."""
    gaps: list[list[Interval]] = []
    slabs: list[list[int]] = []
    for dim, (position, end) in enumerate(cell):
        parallel = sorted((spans[dim], number) for spans, number in boxes if spans[dim] != cell[dim])
        far, free = -1, []
        for (start, stop), number in parallel:
            if start < position:
                met[far], met[number] = number, far
            elif start > position:
                free.append((position, start))
            if stop > position:
                position, far = stop, number
        gaps.append(free + [(position, end)] * (position < end))
        slabs.append([number for _, number in parallel])
    for one, other in permutations(filter(None, slabs), 2):
        met.update(dict.fromkeys(other, one[0]))
    missing = prod(sum(stop - start for start, stop in free) for free in gaps)
    return missing, tuple(free[0] for free in gaps) if missing else None


def _text(ranks: Collection[int]) -> str:
    more = f" and {len(ranks) - PRINTED} more" if len(ranks) > PRINTED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)[:PRINTED]))}{more}"

"""Exact cover: every element of a global tensor is held by exactly one distinct shard; equal shards are copies.

Gathered tables are not trusted. Comparing n shards in pairs takes n**2 / 2 steps a parameter, hours on a large job.
Here parameters with equal tables are checked once, and the n blocks of what is left, in d dims, are

1. a grid, nearly always: n distinct blocks, each a product of intervals that tile their dim, out of a grid of n,
   are that grid. Sets of intervals decide it in O(d n log n).
2. else swept: space is cut wherever no block is cut and, so that depth stays at O(d log n), at the median edge, until
   each block spans its cell in all dims but one. Such slabs are sorted, and swept along that dim. Tilings cut so
   take O(n log(n)**2) as long as cuts meet few blocks; blocks that overlap at random take up to O(n**2).

Layouts need no sweep: placements cut every dim into intervals that tile it, so the blocks are a grid. But ranks may
disagree, which a digest shows. Who holds copies follows from the mesh and its sharded dims alone, in O(ranks).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, permutations, product
from math import prod
from operator import add, attrgetter, ne
from typing import TypeAlias, TypeVar

from hyper_parallel.core.layout import Area, Interval, Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.plan import TensorMeta, digest_bits
from hyper_parallel.core.union import Ranks

Point: TypeAlias = tuple[int, ...]
Blocks: TypeAlias = tuple[tuple[Point, Point], ...]
"""Offsets and sizes in plain tuples, which hash and compare several times faster than areas."""
Spans: TypeAlias = tuple[Interval, ...]
Box: TypeAlias = tuple[Spans, int]
Key = TypeVar("Key", bound=Hashable)

PRINTED = 5


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What one rank says of one parameter. ``problem`` is what it found wrong by itself, in words."""

    global_shape: tuple[int, ...]
    areas: tuple[Area, ...]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ShardCopies:
    """A distinct shard and the ranks that hold it, ascending; the first one represents them.

    Areas without elements are left out, so that ranks that hold nothing are copies of ``areas=()``.
    """

    areas: tuple[Area, ...]
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class CoverageError:
    """``kind`` is ranks, fqns, local, shapes, bounds, overlap or hole; ``fqn`` is empty for a rank as a whole."""

    kind: str
    fqn: str
    ranks: Ranks
    areas: tuple[Area, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.fqn}: {self.reason}" if self.fqn else self.reason


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
        texts = [str(error) for error in same]
        lines += texts[:PRINTED]
        if len(texts) > PRINTED:
            lines.append(f"and {len(texts) - PRINTED} more errors of kind {kind}")
    raise ValueError("\n  ".join(lines))


def check_coverage(tables: Tables, ranks: Collection[int]) -> tuple[Shards, tuple[CoverageError, ...]]:
    """What ``verify_coverage`` returns, and all errors, in O(entries) plus the sweeps of distinct parameters."""
    holders = tuple(sorted(set(ranks).intersection(tables)))
    errors = []
    for rank in sorted(set(tables).symmetric_difference(ranks)):
        what = "outside" if rank in tables else "without a table, though a member"
        errors.append(
            CoverageError("ranks", "", (rank,), (), f"rank {rank} is {what} of the stage {_text(ranks)}")
        )
    fqns = {fqn: None for rank in holders for fqn in tables[rank]}
    complete = all(len(tables[rank]) == len(fqns) for rank in holders)
    shards: Shards = {}
    seen: dict[Hashable, tuple[tuple[ShardCopies, ...], tuple[CoverageError, ...]]] = {}
    for fqn in fqns:
        having = holders if complete else tuple(rank for rank in holders if fqn in tables[rank])
        entries = [tables[rank][fqn] for rank in having]
        blocks = _blocks(entries)
        key = (
            having,
            blocks,
            *(tuple(map(attrgetter(name), entries)) for name in ("global_shape", "problem")),
        )
        if key not in seen:
            held = _grouped(blocks, having)
            areas = {key: [a for a in entry.areas if 0 not in a.sizes] for key, entry in zip(blocks, entries)}
            copies = tuple(ShardCopies(tuple(areas[key]), those) for key, those in held.items())
            seen[key] = copies, tuple(_entry_errors(held, having, entries))
        shards[fqn], found = seen[key]
        if len(having) < len(holders):
            lacking = tuple(sorted(set(holders).difference(having)))
            reason = f"missing on {_text(lacking)}, present on {_text(having)} of the same stage"
            errors.append(CoverageError("fqns", fqn, lacking, (), reason))
        errors += [replace(error, fqn=fqn) for error in found]
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
    """A number of ``DIGEST_BITS`` bits; equal on all ``ranks``, their layouts agree and hence cover exactly.

    Ranks whose meshes are smaller than the stage compare the places of these in their root. Without a root these
    sister meshes are not known, and not compared.

    Raises:
        ValueError: meshes have ranks outside of the stage, or layouts other shapes than their tensors; all are named.
    """
    layouts = [meta.layout for meta in tensors if meta.layout is not None]
    stage, places = set(ranks), {}
    for key, mesh in _distinct_meshes(layouts).items():
        if outside := sorted(stage.symmetric_difference(mesh.ranks) - stage):
            raise ValueError(
                f"{_text(outside)} of the mesh of {_text(mesh.ranks)} are outside of the stage {_text(stage)}"
            )
        root = mesh.root or (mesh if mesh.size == len(stage) else None)
        number = {} if root is None else {rank: number for number, rank in enumerate(root.ranks)}
        # Sister meshes are shifted in their root.
        steps = [number[rank] - number[mesh.ranks[0]] for rank in mesh.ranks if number]
        places[key] = digest_bits(f"{steps} {root and (root.shape, root.ranks)}")
    lines = (f"{meta} {meta.layout and places[id(meta.layout.mesh)]}" for meta in tensors)
    return digest_bits("\n".join([str(sorted(stage)), *lines]))


def _distinct_meshes(layouts: Iterable[Layout]) -> dict[int, Mesh]:
    """By the id of each mesh, one of those equal to it: to hash a mesh takes O(ranks)."""
    distinct: dict[Mesh, Mesh] = {}
    meshes = {id(layout.mesh): layout.mesh for layout in layouts}
    return {key: distinct.setdefault(mesh, mesh) for key, mesh in meshes.items()}


def _chunk_ranks(mesh: Mesh, shard_dims: Point) -> tuple[Ranks, ...]:
    strides = [prod(mesh.shape[d + 1 :]) for d in range(mesh.ndim)]
    spans = [range(0, size * stride, stride) for size, stride in zip(mesh.shape, strides, strict=True)]
    along = [sum(steps) for steps in product(*(spans[d] for d in range(mesh.ndim) if d not in shard_dims))]
    firsts = (sum(steps) for steps in product(*(spans[d] for d in shard_dims)))
    return tuple(tuple(sorted([mesh.ranks[first + step] for step in along])) for first in firsts)


def _blocks(entries: Iterable[LocalShard]) -> tuple[Blocks, ...]:
    bounds = attrgetter("offsets", "sizes")
    return tuple([tuple([b for b in map(bounds, entry.areas) if 0 not in b[1]]) for entry in entries])


def _grouped(keys: Iterable[Key], ranks: Ranks) -> dict[Key, Ranks]:
    groups: dict[Key, list[int]] = {}
    for key, rank in zip(keys, ranks, strict=True):
        groups.setdefault(key, []).append(rank)
    return {key: tuple(group) for key, group in groups.items()}


def _entry_errors(
    held: Mapping[Blocks, Ranks], ranks: Ranks, entries: Sequence[LocalShard]
) -> Iterator[CoverageError]:
    """The errors of one parameter, still without its name."""
    problems = _grouped([entry.problem for entry in entries], ranks)
    for problem, those in problems.items():
        if problem is not None:
            yield CoverageError("local", "", those, (), f"{_text(those)}: {problem}")
    shapes = _grouped([entry.global_shape for entry in entries], ranks)
    shape = entries[0].global_shape
    if len(shapes) > 1 or min(shape, default=0) < 0:
        text = ", ".join(f"{shape} on {_text(those)}" for shape, those in shapes.items())
        yield CoverageError("shapes", "", ranks, (), f"global shape {text}; areas are not compared")
    elif not _is_grid(shape, list(chain.from_iterable(held))):
        # A rank with a problem may not know what it holds.
        errors = _cover_errors(shape, held, ranks)
        yield from (error for error in errors if error.kind != "hole" or set(problems) == {None})


def _is_grid(shape: Point, blocks: Sequence[tuple[Point, Point]]) -> bool:
    if not blocks:
        return 0 in shape
    offsets, sizes = zip(*blocks, strict=True)
    if {*map(len, offsets), *map(len, sizes)} != {len(shape)} or len(set(blocks)) < len(blocks):
        return False
    number = 1
    for d, end in enumerate(shape):
        intervals = sorted({(offset[d], size[d]) for offset, size in blocks})
        number *= len(intervals)
        stops = [start + length for start, length in intervals]
        if [*(start for start, _ in intervals), end] != [0, *stops] or min(
            length for _, length in intervals
        ) < 0:
            return False
    return number == len(blocks)


def _cover_errors(shape: Point, held: Mapping[Blocks, Ranks], ranks: Ranks) -> Iterator[CoverageError]:
    """Blocks outside of ``shape`` (whose inside part counts on), overlaps, and what is missing."""
    boxes: list[Box] = []
    owners: list[tuple[Ranks, Area]] = []
    for those, area in [(those, Area(*block)) for blocks, those in held.items() for block in blocks]:
        stops = tuple(map(add, area.offsets, area.sizes))
        spans = tuple(zip((max(offset, 0) for offset in area.offsets), map(min, stops, shape), strict=False))
        fits = len(area.offsets) == len(area.sizes) == len(shape)
        if (
            not fits
            or spans != tuple(zip(area.offsets, stops, strict=True))
            or min(area.sizes, default=0) < 0
        ):
            reason = f"{_text(those)}: {_where(area)} lies outside of the global shape {shape}"
            yield CoverageError("bounds", "", those, (area,), reason)
        if fits and all(start < stop for start, stop in spans):
            boxes.append((spans, len(owners)))
            owners.append((those, area))
    met: dict[int, int] = {}
    missing, hole = _sweep(tuple((0, size) for size in shape), boxes, met)
    pairs: dict[tuple[Ranks, Ranks], list[Area]] = {}
    for pair in sorted({(min(pair), max(pair)) for pair in met.items()}):
        (one, area), (other, its) = owners[pair[0]], owners[pair[1]]
        pairs.setdefault((one, other), []).extend((area, its))
    for (one, other), areas in pairs.items():
        more = f" (and {len(areas) // 2 - 1} more pairs of areas)" if len(areas) > 2 else ""
        reason = f"{_where(areas[0])} of {_text(one)} overlaps {_where(areas[1])} of {_text(other)}{more}"
        yield CoverageError("overlap", "", tuple(sorted({*one, *other})), tuple(dict.fromkeys(areas)), reason)
    if hole is not None:
        area = Area(tuple(start for start, _ in hole), tuple(stop - start for start, stop in hole))
        reason = (
            f"{missing} of {prod(shape)} elements are missing on {_text(ranks)}, among them {_where(area)}"
        )
        yield CoverageError("hole", "", ranks, (area,), reason)


def _sweep(cell: Spans, boxes: Sequence[Box], met: dict[int, int]) -> tuple[int, Spans | None]:
    """How many elements of ``cell`` are in no box, and where some are; ``met`` names a partner for each box in a pair."""
    loose = [sum(map(ne, spans, cell)) for spans, _ in boxes]
    rest = [spans for (spans, _), dims in zip(boxes, loose, strict=True) if dims > 1]
    if not rest:
        return _sweep_slabs(cell, boxes, met)
    ways = [
        (
            _free_cuts(spans[d] for spans, _ in boxes),
            sorted(x for spans in rest for x in spans[d] if x not in cell[d]),
        )
        for d in range(len(cell))
    ]
    dim = max(range(len(cell)), key=lambda d: (len(ways[d][0]), len(ways[d][1])))
    free, edges = ways[dim]
    cuts = sorted({*free, edges[len(edges) // 2]})
    starts, stops = [cell[dim][0], *cuts], [*cuts, cell[dim][1]]
    inside: list[list[Box]] = [[] for _ in starts]
    for spans, number in boxes:
        start, stop = spans[dim]
        for part in range(bisect_right(stops, start), bisect_left(starts, stop)):
            span = max(start, starts[part]), min(stop, stops[part])
            inside[part].append(((*spans[:dim], span, *spans[dim + 1 :]), number))
    cells = [(*cell[:dim], span, *cell[dim + 1 :]) for span in zip(starts, stops, strict=True)]
    found = [_sweep(part, some, met) for part, some in zip(cells, inside, strict=True)]
    return sum(missing for missing, _ in found), next((hole for _, hole in found if hole is not None), None)


def _free_cuts(spans: Iterable[Interval]) -> list[int]:
    """Where intervals start and none is cut."""
    ordered = sorted(spans)
    reach = accumulate((stop for _, stop in ordered), max)
    return [start for (start, _), far in zip(ordered[1:], reach, strict=False) if start >= far]


def _sweep_slabs(cell: Spans, boxes: Sequence[Box], met: dict[int, int]) -> tuple[int, Spans | None]:
    """``_sweep`` for boxes that span ``cell`` in all dims but one: sorted along it, each meets the farthest before."""
    for spans, number in boxes:
        if spans == cell:
            met.update((other, number) for _, other in boxes if other != number)
            met.update((number, other) for _, other in boxes if other != number)
            return 0, None
    gaps: list[list[Interval]] = []
    numbers: list[list[int]] = []
    for dim, (position, end) in enumerate(cell):
        parallel = sorted((spans[dim], number) for spans, number in boxes if spans[dim] != cell[dim])
        far, free = -1, []
        for (start, stop), number in parallel:
            if start < position:
                met[number], met[far] = far, number
            elif start > position:
                free.append((position, start))
            if stop > position:
                position, far = stop, number
        gaps.append(free + [(position, end)] * (position < end))
        numbers.append([number for _, number in parallel])
    for one, other in permutations(filter(None, numbers), 2):
        met.update((number, one[0]) for number in other)
    missing = prod(sum(stop - start for start, stop in free) for free in gaps)
    return missing, tuple(free[0] for free in gaps) if missing else None


def _text(ranks: Collection[int]) -> str:
    """Such as "ranks 0-3, 8": runs, the first few."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:PRINTED]]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}{', ...' * (len(runs) > PRINTED)}"


def _where(area: Area) -> str:
    return f"the area at offsets {area.offsets} of sizes {area.sizes}"

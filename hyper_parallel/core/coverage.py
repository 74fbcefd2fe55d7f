"""Exact cover: every element of a global tensor is held by exactly one distinct shard; equal shards are copies.

Gathered tables are not trusted: every entry of every rank is looked at. Comparing n shards in pairs takes n**2 / 2 steps
a parameter, hours on a large job. ``core.sweep`` takes O(n), and what an entry costs beside it decides: on 1,000
ranks a million entries are read. So what travels is columns of bytes, which are small, hash fast and are no
work for the garbage collector; they are compared as they are, and their numbers are looked at a column at a time.

Layouts need none of it, as placements cut every dim into intervals that tile it. But ranks may disagree, which a digest
shows.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from math import prod
from operator import add, attrgetter
from struct import pack, unpack
from typing import TypeAlias, TypeVar

from hyper_parallel.core.layout import Area, Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.plan import TensorMeta, digest_bits
from hyper_parallel.core.sweep import Box, Shape, faulty_cell, is_grid, sweep
from hyper_parallel.core.union import Ranks

Areas: TypeAlias = tuple[Area, ...]
Record: TypeAlias = bytes
"""Areas, packed."""
Key = TypeVar("Key", bound=Hashable)

PRINTED = 5


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What one rank says of one parameter. ``problem`` is what it found wrong by itself, in words."""

    global_shape: tuple[int, ...]
    areas: Areas
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """What one rank says of all its parameters, in columns; ``problems`` by FQN, of the parameters that have one."""

    fqns: tuple[str, ...]
    shapes: tuple[Shape, ...]
    records: tuple[Record, ...]
    problems: Mapping[str, str]

    @classmethod
    def of(cls, shards: Mapping[str, LocalShard]) -> Table:
        """The table of a rank with these shards, by FQN."""
        return cls(
            tuple(shards),
            tuple(shard.global_shape for shard in shards.values()),
            tuple(pack_areas(shard.areas) for shard in shards.values()),
            {fqn: shard.problem for fqn, shard in shards.items() if shard.problem is not None},
        )

    @classmethod
    def received(cls, data: bytes) -> Table:
        """The table that was ``sent``."""
        table: Table = pickle.loads(zlib.decompress(data))
        return table

    def sent(self) -> bytes:
        """What travels. It is mostly names and zeros, which compress to a tenth."""
        return zlib.compress(pickle.dumps(self), 1)


@dataclass(frozen=True, slots=True)
class CoverageError:
    """``kind`` is ranks, fqns, local, shapes, bounds, overlap or hole; ``fqn`` is empty for a rank as a whole."""

    kind: str
    ranks: Ranks
    reason: str
    areas: Areas = ()
    fqn: str = ""


Held: TypeAlias = dict[Record, Ranks]
"""Of a parameter the distinct shards, and the ranks that hold each; the first, smallest, represents it."""
Shards: TypeAlias = dict[str, Held]
Found: TypeAlias = tuple[CoverageError, ...]
Column: TypeAlias = tuple[Shape, Ranks, Sequence[Record]]
Tables: TypeAlias = Mapping[int, Table]


def pack_areas(areas: Areas) -> Record:
    """Those areas that have elements, each as its numbers of offsets and of sizes, its offsets and its sizes."""
    held = [area for area in areas if 0 not in area.sizes]
    numbers = [(len(area.offsets), len(area.sizes), *area.offsets, *area.sizes) for area in held]
    return pack(f"<{sum(map(len, numbers))}q", *chain.from_iterable(numbers))


def unpack_areas(record: Record) -> Areas:
    """The areas of a record."""
    numbers = list(_numbers(record))
    areas = []
    while numbers:
        middle, end = 2 + numbers[0], 2 + numbers[0] + numbers[1]
        areas.append(Area(tuple(numbers[2:middle]), tuple(numbers[middle:end])))
        del numbers[:end]
    return tuple(areas)


def verify_coverage(tables: Tables, ranks: Collection[int]) -> Shards:
    """The distinct shards of every FQN, from the tables of ``ranks``, a pipeline stage.

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


def check_coverage(tables: Tables, ranks: Collection[int]) -> tuple[Shards, Found]:
    """What ``verify_coverage`` returns, and all errors."""
    errors = []
    for rank in sorted(set(tables).symmetric_difference(ranks)):
        what = "outside" if rank in tables else "without a table, but a member"
        errors.append(
            CoverageError("ranks", (rank,), f"rank {rank} is {what} of the stage of {_text(ranks)}")
        )
    holders = tuple(sorted(set(ranks).intersection(tables)))
    problems: dict[str, list[tuple[int, str]]] = {}
    for rank in holders:
        for fqn, problem in tables[rank].problems.items():
            problems.setdefault(fqn, []).append((rank, problem))
    shards: Shards = {}
    seen: dict[Hashable, tuple[Held, Found]] = {}
    for fqn, columns in _columns(tables, holders).items():
        column = tuple(columns), tuple(problems.get(fqn, ()))
        if column not in seen:
            seen[column] = _check(*column)
        shards[fqn], found = seen[column]
        errors += [replace(error, fqn=fqn, reason=f"{fqn}: {error.reason}") for error in found]
        present = [rank for _, those, _ in columns for rank in those]
        if lacking := sorted(set(holders).difference(present) if len(present) < len(holders) else ()):
            reason = f"{fqn}: missing on {_text(lacking)}, present on {_text(present)} of the same stage"
            errors.append(CoverageError("fqns", tuple(lacking), reason, fqn=fqn))
    return shards, tuple(errors)


def local_shard(layout: Layout, rank: int) -> LocalShard:
    """What ``rank`` holds according to ``layout``; to be outside of its mesh is a problem."""
    if layout.mesh.coordinate(rank) is None:
        return LocalShard(layout.global_shape, (), f"outside of its mesh of {_text(layout.mesh.ranks)}")
    return LocalShard(layout.global_shape, layout.areas(rank))


def layout_digest(tensors: Sequence[TensorMeta], ranks: Collection[int]) -> int:
    """A number of ``DIGEST_BITS`` bits; if it is equal on all ``ranks``, their layouts agree and hence cover exactly.

    Of a mesh smaller than the stage its steps in its root go in. Without a root its sisters remain unknown.

    Raises:
        ValueError: a mesh has ranks outside of ``ranks``.
    """
    places: dict[Mesh, int] = {}
    for mesh in dict.fromkeys(meta.layout.mesh for meta in tensors if meta.layout is not None):
        if outside := set(mesh.ranks).difference(ranks):
            raise ValueError(f"a mesh has {_text(outside)}, outside of the stage of {_text(ranks)}")
        root = mesh.root or mesh
        number = {rank: number for number, rank in enumerate(root.ranks)}
        steps = [number[rank] - number[mesh.ranks[0]] for rank in mesh.ranks]
        shared = root.ranks if root is not mesh or mesh.size == len(ranks) else None
        places[mesh] = digest_bits(f"{root.shape} {shared} {steps}")
    lines = (f"{meta} {meta.layout and places[meta.layout.mesh]}" for meta in tensors)
    return digest_bits("\n".join([str(sorted(ranks)), *lines]))


def _columns(tables: Tables, holders: Ranks) -> dict[str, list[Column]]:
    """By FQN what ranks hold of it; those with the same FQNs and shapes, usually all, together."""
    columns: dict[str, list[Column]] = {}
    alike = _grouped([(tables[rank].fqns, tables[rank].shapes) for rank in holders], holders)
    for (fqns, shapes), ranks in alike.items():
        records = zip(*(tables[rank].records for rank in ranks), strict=True)
        for fqn, shape, column in zip(fqns, shapes, records, strict=True):
            columns.setdefault(fqn, []).append((shape, ranks, column))
    return columns


def _grouped(keys: Sequence[Key], ranks: Ranks) -> dict[Key, Ranks]:
    """The ranks of each key. Nearly all is done in C as long as most keys are of one rank alone."""
    groups: dict[Key, Ranks] = dict(zip(keys, zip(ranks, strict=True), strict=True))
    before: dict[Key, list[int]] = {}
    if len(groups) < len(ranks):
        for key, last, rank in zip(keys, map(groups.__getitem__, keys), ranks, strict=True):
            if rank != last[0]:
                before.setdefault(key, []).append(rank)
    groups.update({key: (*those, *groups[key]) for key, those in before.items()})
    return groups


def _check(columns: Sequence[Column], problems: Sequence[tuple[int, str]]) -> tuple[Held, Found]:
    """The shards of one parameter, and its errors, which still lack its name."""
    shape, ranks, records = columns[0]
    errors = []
    shapes: dict[Shape, list[int]] = {}
    for each, those, _ in columns:
        shapes.setdefault(each, []).extend(those)
    if len(columns) > 1:
        pairs = sorted(pair for _, those, some in columns for pair in zip(those, some, strict=True))
        ranks, records = tuple(rank for rank, _ in pairs), [record for _, record in pairs]
    held = _grouped(records, ranks)
    if problems:
        troubled, texts = zip(*problems, strict=True)
        for text, those in _grouped(texts, troubled).items():
            errors.append(CoverageError("local", those, f"{_text(those)}: {text}"))
    if len(shapes) > 1 or min(shape, default=0) < 0:
        text = ", ".join(f"{shape} on {_text(those)}" for shape, those in shapes.items())
        errors.append(CoverageError("shapes", ranks, f"global shape {text}; areas are not compared"))
    elif not _is_tiled(shape, held):
        # A rank with a problem may not know what it holds.
        errors += [e for e in _cover_errors(shape, held, ranks) if not problems or e.kind != "hole"]
    return held, tuple(errors)


def _numbers(record: Record) -> tuple[int, ...]:
    return unpack(f"<{len(record) // 8}q", record)


def _is_tiled(shape: Shape, records: Collection[Record]) -> bool:
    numbers, ndim = _numbers(b"".join(records)), len(shape)
    step = 2 + 2 * ndim
    count = len(numbers) // step
    if not numbers[::step].count(ndim) == numbers[1::step].count(ndim) == count == len(numbers) / step:
        return False
    starts = [numbers[2 + dim :: step] for dim in range(ndim)]
    sizes = [numbers[2 + ndim + dim :: step] for dim in range(ndim)]
    if any(min(column, default=0) < 0 for column in (*starts, *sizes)):
        return False
    # Records differ, so boxes do if each record has one.
    if count == len(records) - (b"" in records) and is_grid(shape, starts, sizes, count):
        return True
    stops = [list(map(add, *columns)) for columns in zip(starts, sizes, strict=True)]
    if any(max(column, default=0) > size for column, size in zip(stops, shape, strict=True)):
        return False
    return faulty_cell(shape, list(zip(starts, stops, strict=True)), count) is None


def _cover_errors(shape: Shape, held: Held, ranks: Ranks) -> Iterator[CoverageError]:
    """Areas outside of ``shape`` (what lies inside still counts), overlaps, and what is missing."""
    owners = [(area, those) for record, those in held.items() for area in unpack_areas(record)]
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
    missing, hole = sweep(shape, boxes, met)
    for pair in sorted({(min(pair), max(pair)) for pair in met.items()}):
        (one, those), (other, others) = owners[pair[0]], owners[pair[1]]
        reason = f"{one} on {_text(those)} overlaps {other} on {_text(others)}"
        yield CoverageError("overlap", tuple(sorted({*those, *others})), reason, (one, other))
    if hole is not None:
        area = Area(tuple(start for start, _ in hole), tuple(stop - start for start, stop in hole))
        reason = f"{missing} of {prod(shape)} elements are missing on {_text(ranks)}, among them {area}"
        yield CoverageError("hole", ranks, reason, (area,))


def _text(ranks: Collection[int]) -> str:
    more = f" and {len(ranks) - PRINTED} more" if len(ranks) > PRINTED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)[:PRINTED]))}{more}"

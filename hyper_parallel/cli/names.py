"""Names for many at once: parameters that differ in numbers only, ranks, bytes, placements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import prod

from hyper_parallel.cli.explanation import ParameterGroup, progressions
from hyper_parallel.core.placement import Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.plan import TensorMeta
from hyper_parallel.core.union import Ranks

_NUMBER = re.compile(r"(\d+)")
_MAX_RANGES = 3


def placement_name(placement: Placement) -> str:
    """As a description has it."""
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    if isinstance(placement, StridedShard):
        return f"StridedShard({placement.dim}, split_factor={placement.split_factor})"
    return "Replicate()" if isinstance(placement, Replicate) else f"Partial({placement.reduce_op})"


def group_parameters(held: Iterable[tuple[TensorMeta, int]]) -> tuple[ParameterGroup, ...]:
    """Tensors and the elements this rank holds of them, those together that differ in numbers in their names only."""
    alike: dict[object, list[tuple[TensorMeta, int]]] = {}
    for meta, numel in held:
        layout = meta.layout
        pattern = tuple(_NUMBER.split(meta.name)[::2])
        where = None if layout is None else (layout.mesh.dim_names, layout.mesh.shape, layout.placements)
        alike.setdefault((pattern, meta.global_shape, where), []).append((meta, numel))
    return tuple(_group(members) for members in alike.values())


def _group(members: Sequence[tuple[TensorMeta, int]]) -> ParameterGroup:
    first, layout = members[0][0], members[0][0].layout
    mesh_dims: tuple[tuple[str, int], ...] = ()
    if layout is not None:
        names = layout.mesh.dim_names or tuple(f"dim{d}" for d in range(layout.mesh.ndim))
        mesh_dims = tuple(zip(names, layout.mesh.shape, strict=True))
    return ParameterGroup(
        name=common_name([meta.name for meta, _ in members]),
        count=len(members),
        global_shape=first.global_shape,
        mesh_dims=mesh_dims,
        placements=() if layout is None else tuple(map(placement_name, layout.placements)),
        elements=sum(numel for _, numel in members),
    )


def common_name(names: Sequence[str]) -> str:
    """``layers.{0..31}.wq`` for names with all of these numbers, ``layers.*.wq`` for others."""
    pieces = [_NUMBER.split(name) for name in names]
    columns = [sorted({int(piece[place]) for piece in pieces}) for place in range(1, len(pieces[0]), 2)]
    whole = prod(map(len, columns)) == len(names)
    shown = []
    for numbers in columns:
        contiguous = numbers[-1] - numbers[0] == len(numbers) - 1
        if len(numbers) == 1:
            shown.append(str(numbers[0]))
        else:
            shown.append(f"{{{numbers[0]}..{numbers[-1]}}}" if whole and contiguous else "*")
    texts = pieces[0][::2]
    return texts[0] + "".join(number + text for number, text in zip(shown, texts[1:], strict=True))


def ranks_name(ranks: Ranks) -> str:
    """``0-1023``, ``0, 8, .. 1016``, ``0-7, 64-71, ...``."""
    if len(ranks) <= 2:
        return ", ".join(map(str, ranks))
    found = progressions(ranks)
    shown = ", ".join(_progression_name(*each) for each in found[:_MAX_RANGES])
    return f"{shown}, .. {ranks[-1]}" if len(found) > _MAX_RANGES else shown


def _progression_name(start: int, stop: int, step: int) -> str:
    last = stop - step
    if start == last:
        return str(start)
    if step == 1:
        return f"{start}-{last}"
    between = f", {start + step}, .. " if start + 2 * step < last else f", {start + step}, "
    return f"{start}{between}{last}" if start + step < last else f"{start}, {last}"


def bytes_name(number: int) -> str:
    """``800 B``, ``16.0 MB`` (binary)."""
    size, units = float(number), ["B", "KB", "MB", "GB", "TB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"

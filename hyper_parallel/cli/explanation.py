"""What an explanation consists of, and its form for machines: ``Explanation.as_json``, or ``explain --json``.

Keys stay what they are; a change of meaning raises ``format``.

=============  =============================================================================================
top            ``format``, ``rank``, ``world_size`` (or null), ``totals``, ``host_waits``, ``parts``, ``last``,
               ``collectives`` (all of them in the order in which they run), ``warnings``
totals         ``parameters``, ``collectives``, ``bytes``, ``elements_read``, ``bytes_read`` (or null)
a part         ``num_ranks``, ``holders``, ``terms``, ``collectives``
a term         ``kind`` (local or partial), ``parameters``, ``num_parameters``, ``elements``, ``copies``,
               ``shared`` (or null), ``buckets``, ``elements_reduced``
parameters     ``name``, ``count``, ``global_shape``, ``mesh`` ({dim: size}), ``placements``, ``elements``
a collective   ``op``, ``reduce_op``, ``purpose``, ``num_ranks``, ``ranks``, ``elements``, ``bytes``, ``repeats``
a warning      ``kind`` (see ``advice``), ``text``, ``parameters``
=============  =============================================================================================

``last`` are collectives that combine pipeline stages where no part does. ``ranks`` are lists [start, stop, step] as
``range`` takes them. ``elements`` of parameters and terms are those that this rank holds. ``elements`` and ``bytes``
of a collective are those of the buffer that is passed to it; in ``totals``, of all of them times their repeats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.union import Ranks

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective and how often it runs, ``elements`` and ``num_bytes`` being those of one buffer.

    ``purpose``: ``agree`` (do all ranks reduce the same Partial gradients), ``flags`` (which of them are there),
    ``bucket`` (their values), ``statistic`` (the norm), ``stages`` (of the pipeline).
    """

    op: str
    reduce_op: str
    purpose: str
    ranks: Ranks
    elements: int
    num_bytes: int
    repeats: int = 1

    def as_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "reduce_op": self.reduce_op,
            "purpose": self.purpose,
            "num_ranks": len(self.ranks),
            "ranks": [list(each) for each in progressions(self.ranks)],
            "elements": self.elements,
            "bytes": self.num_bytes,
            "repeats": self.repeats,
        }


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that are alike but for numbers in their names; ``elements`` are those this rank holds of all."""

    name: str
    count: int
    global_shape: tuple[int, ...]
    mesh_dims: tuple[tuple[str, int], ...]
    placements: tuple[str, ...]
    elements: int

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "count": self.count,
            "global_shape": list(self.global_shape),
            "mesh": dict(self.mesh_dims),
            "placements": list(self.placements),
            "elements": self.elements,
        }


@dataclass(frozen=True, slots=True)
class TermExplanation:
    """Parameters that are counted alike: ``copies`` ranks hold each piece, and each counts its share.

    ``partial``: the values are reduced first, in ``buckets``, and this rank then holds ``elements_reduced`` of them.
    """

    partial: bool
    groups: tuple[ParameterGroup, ...]
    elements: int
    copies: int
    shared: str | None
    buckets: int = 0
    elements_reduced: int = 0

    @property
    def count(self) -> int:
        return sum(group.count for group in self.groups)

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "partial" if self.partial else "local",
            "parameters": [group.as_json() for group in self.groups],
            "num_parameters": self.count,
            "elements": self.elements,
            "copies": self.copies,
            "shared": self.shared,
            "buckets": self.buckets,
            "elements_reduced": self.elements_reduced,
        }


@dataclass(frozen=True, slots=True)
class PartExplanation:
    """One packed buffer: what goes into it, and the collectives that precede (``before``) and finish it.

    ``holders`` of the ``num_ranks`` may hold these parameters: those of this pipeline stage, or all of them.
    """

    num_ranks: int
    holders: int
    terms: tuple[TermExplanation, ...]
    before: tuple[Collective, ...]
    finish: tuple[Collective, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "num_ranks": self.num_ranks,
            "holders": self.holders,
            "terms": [term.as_json() for term in self.terms],
            "collectives": [each.as_json() for each in (*self.before, *self.finish)],
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """A warning in plain language about some parameters; ``kind`` is one of those in ``advice``."""

    kind: str
    text: str
    parameters: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, "parameters": list(self.parameters)}


@dataclass(frozen=True, slots=True)
class Explanation:
    """The plan of one rank in numbers, for a 2-norm with every gradient present, after the first step.

    ``world_size`` and ``bytes_read`` are None where they are not known. ``last`` combines pipeline stages that no
    part combines. ``elements_read`` includes this rank's slices of reduced Partial gradients.
    ``host_waits``: on an accelerator the host waits for the device in every call.
    """

    rank: int
    world_size: int | None
    parts: tuple[PartExplanation, ...]
    last: tuple[Collective, ...]
    elements_read: int
    bytes_read: int | None
    host_waits: bool
    warnings: tuple[Advice, ...]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All of them in the order in which they run."""
        before = [each for part in self.parts for each in part.before]
        finish = [each for part in self.parts for each in part.finish]
        return (*before, *finish, *self.last)

    @property
    def num_collectives(self) -> int:
        return sum(each.repeats for each in self.collectives)

    @property
    def num_bytes(self) -> int:
        return sum(each.repeats * each.num_bytes for each in self.collectives)

    @property
    def num_parameters(self) -> int:
        return sum(term.count for part in self.parts for term in part.terms)

    def as_json(self) -> dict[str, Any]:
        """For machines; the module's docstring describes the keys."""
        return {
            "format": FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "totals": {
                "parameters": self.num_parameters,
                "collectives": self.num_collectives,
                "bytes": self.num_bytes,
                "elements_read": self.elements_read,
                "bytes_read": self.bytes_read,
            },
            "host_waits": self.host_waits,
            "parts": [part.as_json() for part in self.parts],
            "last": [each.as_json() for each in self.last],
            "collectives": [each.as_json() for each in self.collectives],
            "warnings": [each.as_json() for each in self.warnings],
        }


def progressions(ranks: Ranks) -> tuple[tuple[int, int, int], ...]:
    """Sorted ranks as (start, stop, step): ``(0, 1, 2, 3, 8, 9)`` is 0 to 4 by 1 and 8 to 10 by 1."""
    found: list[tuple[int, int, int]] = []
    position = 0
    while position < len(ranks):
        start = ranks[position]
        step = ranks[position + 1] - start if position + 1 < len(ranks) else 1
        end = position + 1
        while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        found.append((start, ranks[end - 1] + (step if end - position > 1 else 1), step))
        if end - position == 1:
            found[-1] = (start, start + 1, 1)
        position = end
    return tuple(found)

"""What went wrong on some rank, told on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.union import Ranks
from hyper_parallel.interface import Platform

Report = tuple[int | None, str, str]
_TYPES = {kind.__name__: kind for kind in (ValueError, TypeError, NotImplementedError, MemoryError)}


@dataclass(frozen=True, slots=True)
class Failure:
    """Reports of (rank, error type, message); ``cause`` is this rank's own error. Rank None speaks of several."""

    reports: tuple[Report, ...]
    cause: Exception | None = field(default=None, compare=False)

    @classmethod
    def of(cls, rank: int, errors: Sequence[Exception]) -> Failure | None:
        """The first of this rank's errors, if there are any."""
        return cls(((rank, type(errors[0]).__name__, str(errors[0])),), errors[0]) if errors else None

    def exception(self, alone: bool = False) -> Exception:
        """What to raise: the type of the first report, and the messages of all of them; ``alone``, the cause."""
        if alone and self.cause is not None:
            return self.cause
        kind = _TYPES.get(self.reports[0][1], RuntimeError)
        raised = kind(
            "; ".join(text if rank is None else f"rank {rank}: {text}" for rank, _, text in self.reports)
        )
        raised.__cause__ = self.cause
        return raised


def gather(platform: Platform, steps: Sequence[Ranks], value: Any) -> list[tuple[int, Any]]:
    """(rank, value) of all ranks that ``steps`` lead to, by rank; one object gather per step."""
    gathered = [(platform.rank(), value)]
    for ranks in steps:
        gathered = [pair for pairs in platform.all_gather_object(gathered, ranks) for pair in pairs]
    return sorted(gathered, key=lambda pair: pair[0])


def merged(found: Sequence[tuple[int, Sequence[Report]]], own: Failure | None) -> Failure:
    """One failure of the reports that the ranks gathered, each once."""
    reports = dict.fromkeys(report for _, reports in found for report in reports)
    return Failure(tuple(reports), None if own is None else own.cause)


def difference(listed: Sequence[tuple[int, Sequence[str]]]) -> Failure:
    """Where the tensor lists of two ranks part."""
    first, reference = listed[0]
    for rank, lines in listed[1:]:
        for here, there in zip(
            [*reference, "no further tensor"], [*lines, "no further tensor"], strict=False
        ):
            if here != there:
                text = f"the ranks clip different tensors: rank {first} has {here}; rank {rank} has {there}"
                return Failure(((None, "RuntimeError", text),))
    text = "the ranks clip the same tensors, but with different groups of ranks"
    return Failure(((None, "RuntimeError", text),))

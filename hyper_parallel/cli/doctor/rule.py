"""What a rule is: a condition on the findings, the problem in words, and one remedy for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from hyper_parallel.cli.doctor.findings import Findings

ERROR, WARNING = "error", "warning"

Fields = Iterator[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a table of rules.

    The condition yields one set of fields for each time that it is met; they are filled into both sentences. A rule
    is silent where one that explains more (``unless``, which stands before it) has spoken.
    """

    name: str
    severity: str
    condition: Callable[[Findings], Fields]
    problem: str
    remedy: str
    unless: tuple[str, ...] = ()

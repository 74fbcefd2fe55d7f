"""The report for people: one HTML page that needs nothing else, to be sent by mail or attached to a ticket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

DTYPES = ("float32", "bfloat16", "float16", "mixed dtypes", "tiny")
MISSING = "missing gradients"
_TEMPLATE = "report.html.jinja"


def write_page(document: Mapping[str, Any], path: Path) -> None:
    """Write ``parity.json``'s document as a page."""
    path.write_text(render_page(document), encoding="utf-8")


def render_page(document: Mapping[str, Any]) -> str:
    """The page; every text of the document is escaped."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["error"] = error_text
    source = files("hyper_parallel.parity").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    platforms = document["environment"]["platforms"]
    return environment.from_string(source).render(
        document=document,
        columns=(*DTYPES, MISSING),
        tables={name: _table(document["cases"], name) for name in platforms},
        failures=[case for case in document["cases"] if case["verdict"] == "failed"],
        unrun={name: _reasons(document["cases"], name) for name in platforms},
    )


def error_text(error: float | str) -> str:
    """``1.2e-08``, or a dash where there is no norm."""
    return f"{error:.1e}" if isinstance(error, float | int) else {"nan": "-"}.get(error, error)


def _column(case: Mapping[str, Any]) -> str:
    return case["variant"] if case["variant"] in DTYPES else MISSING


def _table(cases: Sequence[Mapping[str, Any]], platform: str) -> dict[str, dict[str, dict[str, Any]]]:
    """By parallelism and column: how many cases passed on a platform, how many there are, and the largest error."""
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for case in cases:
        found = case["platforms"][platform]
        row = table.setdefault(case["parallelism"], {})
        cell = row.setdefault(_column(case), {"passed": 0, "failed": 0, "total": 0, "error": "nan"})
        cell["total"] += 1
        cell["passed"] += found["verdict"] == "passed"
        cell["failed"] += found["verdict"] == "failed"
        cell["error"] = _larger(cell["error"], found["largest_error"])
    return table


def _larger(one: float | str, other: float | str) -> float | str:
    if one == "nan" or other == "nan":
        return other if one == "nan" else one
    return max(one, other, key=float)


def _reasons(cases: Sequence[Mapping[str, Any]], platform: str) -> dict[str, list[str]]:
    """Why cases were not run on a platform, with their names."""
    reasons: dict[str, list[str]] = {}
    for case in cases:
        if (reason := case["platforms"][platform]["reason"]) is not None:
            reasons.setdefault(reason, []).append(case["name"])
    return reasons

"""The report of a run: ``parity.json``, ``junit.xml`` and ``parity.html``, all three from one document.

The JSON, schema ``hyper-parallel-parity/1``; numbers that JSON lacks are the strings "inf", "-inf" and "nan":

- ``schema``, ``version`` (of this library), ``started`` (ISO 8601, UTC), ``seconds``
- ``verdict``: "passed" or "failed"; ``passed``, ``failed``, ``not_run``: numbers of cases
- ``environment``: ``launcher``, ``device`` (its type), ``python``, ``system``, and ``platforms``: by name the
  ``backend``, the ``versions`` and the ``ranks`` (each ``rank``, ``host``, ``device``) of the largest group
- ``cases``: each ``name``, ``parallelism``, ``variant``, ``world_size``, ``meshes`` (lists of [dim name, size]),
  ``verdict`` ("passed", "failed" or "not run"), ``between_platforms`` (texts of differences), and ``platforms``: by
  name ``verdict``, ``seconds``, ``failures`` (texts), ``reason`` (why it was not run), ``largest_error`` (relative, of
  a norm in any dtype) and ``norms``, a list of ``form``, ``p``, ``norm`` (rank 0's) and ``expected``
"""

from __future__ import annotations

import json
import math
import platform as machine
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

from hyper_parallel.parity.checks import Verdict
from hyper_parallel.parity.environment import RankFacts, installed_versions
from hyper_parallel.parity.junit import write_junit
from hyper_parallel.parity.page import write_page
from hyper_parallel.parity.suite import Result, Settings, SuiteRun

Document: TypeAlias = dict[str, Any]
SCHEMA = "hyper-parallel-parity/1"


def write_report(document: Document, directory: str) -> tuple[Path, ...]:
    """Write the three files, over older ones; their paths."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / "parity.json", folder / "junit.xml", folder / "parity.html")
    paths[0].write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    write_junit(document, paths[1])
    write_page(document, paths[2])
    return paths


def build_document(settings: Settings, run: SuiteRun, started: datetime) -> Document:
    """Everything that is known of a run, ready for JSON. ``started`` has a time zone."""
    cases = [_case(result, run.platforms) for result in run.results]
    verdicts = [case["verdict"] for case in cases]
    return {
        "schema": SCHEMA,
        "version": installed_versions().get("hyper-parallel", "unknown"),
        "started": started.astimezone(timezone.utc).isoformat(timespec="seconds"),
        "seconds": round((datetime.now(timezone.utc) - started).total_seconds(), 3),
        "verdict": "passed" if run.passed else "failed",
        "passed": verdicts.count("passed"),
        "failed": verdicts.count("failed"),
        "not_run": verdicts.count("not run"),
        "environment": {
            "launcher": settings.launcher,
            "device": settings.device_type,
            "python": machine.python_version(),
            "system": machine.platform(),
            "platforms": {name: _platform(run.ranks.get(name, ())) for name in run.platforms},
        },
        "cases": cases,
    }


def _platform(ranks: tuple[RankFacts, ...]) -> Document:
    """Versions and backends that differ between ranks are all named."""
    versions: dict[str, list[str]] = {}
    for name, value in (pair for facts in ranks for pair in facts.versions):
        versions[name] = list(dict.fromkeys([*versions.get(name, []), value]))
    return {
        "backend": " and ".join(dict.fromkeys(facts.backend for facts in ranks)),
        "versions": {name: " and ".join(values) for name, values in versions.items()},
        "ranks": [{"rank": facts.rank, "host": facts.host, "device": facts.device} for facts in ranks],
    }


def _case(result: Result, platforms: tuple[str, ...]) -> Document:
    case = result.case
    return {
        "name": case.name,
        "parallelism": case.parallelism,
        "variant": case.variant,
        "world_size": case.world_size,
        "meshes": [[*map(list, zip(mesh.dim_names, mesh.shape, strict=True))] for mesh in case.meshes],
        "verdict": "failed" if result.failures else "not run" if result.not_run else "passed",
        "between_platforms": list(result.failures.get("between platforms", ())),
        "platforms": {name: _on_platform(result, name) for name in platforms},
    }


def _on_platform(result: Result, name: str) -> Document:
    verdict = result.verdicts.get(name, Verdict(result.case, (), math.nan, ()))
    state = "failed" if name in result.failures else "not run" if name in result.not_run else "passed"
    return {
        "verdict": state,
        "seconds": round(result.seconds.get(name, 0.0), 3),
        "failures": list(verdict.failures),
        "reason": result.not_run.get(name),
        "largest_error": _number(verdict.error),
        "norms": [
            {"form": form, "p": _number(p), "norm": _number(norm), "expected": _number(expected)}
            for (form, p, norm), expected in zip(verdict.norms, verdict.expected, strict=True)
        ],
    }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)

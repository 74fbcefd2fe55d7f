"""The report for continuous integration: JUnit XML, a suite per platform and one for the comparison of platforms."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite

# XML 1.0 has no way to write these, and a traceback or a log may hold them.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
BETWEEN = "between platforms"


def write_junit(document: Mapping[str, Any], path: Path) -> None:
    """Write ``parity.json``'s document as JUnit XML; a case that was not run is an error there."""
    xml = JUnitXml("hyper-parallel parity")
    names = list(document["environment"]["platforms"])
    for name in names:
        suite = _suite(document, name)
        for key, value in _properties(document, name):
            suite.add_property(key, _clean(value))
        for case in document["cases"]:
            found = case["platforms"][name]
            suite.add_testcase(_testcase(case, name, found["seconds"], found["failures"], found["reason"]))
        xml.add_testsuite(suite)
    if len(names) > 1:
        suite = _suite(document, BETWEEN)
        for case in document["cases"]:
            unrun = [name for name in names if not case["platforms"][name]["norms"]]
            reason = f"no norms from {', '.join(unrun)}" if unrun else None
            suite.add_testcase(_testcase(case, BETWEEN, 0.0, case["between_platforms"], reason))
        xml.add_testsuite(suite)
    xml.update_statistics()  # type: ignore[no-untyped-call]
    xml.write(str(path), pretty=True)


def _suite(document: Mapping[str, Any], name: str) -> TestSuite:
    suite = TestSuite(f"parity: {name}")
    suite.timestamp = document["started"]
    ranks = document["environment"]["platforms"].get(name, {}).get("ranks")
    if ranks:
        suite.hostname = _clean(ranks[0]["host"])
    return suite


def _properties(document: Mapping[str, Any], name: str) -> list[tuple[str, str]]:
    environment = document["environment"]
    here = environment["platforms"][name]
    return [
        *((key, environment[key]) for key in ("launcher", "device", "python", "system")),
        ("backend", here["backend"]),
        *here["versions"].items(),
        *((f"rank {each['rank']}", f"{each['host']}, {each['device']}") for each in here["ranks"]),
    ]


def _testcase(
    case: Mapping[str, Any], where: str, seconds: float, failures: list[str], reason: str | None
) -> TestCase:
    testcase = TestCase(_clean(case["name"]), _clean(f"parity.{where}.{case['parallelism']}"), seconds)
    result: Failure | Error | None = None
    if failures:
        result = Failure(_clean(failures[0].partition("\n")[0]), "ParityFailure")
        result.text = _clean("\n".join(failures))
    elif reason is not None:
        result = Error(_clean(reason.partition("\n")[0]), "NotRun")
        result.text = _clean(reason)
    if result is not None:
        testcase.result = [result]
    return testcase


def _clean(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)

"""The report: what JSON, JUnit XML and the page say of a run in which everything happened once."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from junitparser import JUnitXml

from hyper_parallel.parity.cases import NORM_TYPES, build_cases
from hyper_parallel.parity.checks import Verdict
from hyper_parallel.parity.environment import RankFacts
from hyper_parallel.parity.page import error_text
from hyper_parallel.parity.report import SCHEMA, build_document, write_report
from hyper_parallel.parity.suite import Result, Settings, SuiteRun, unrun_suite

PLATFORMS = ("torch", "mindspore")
HOSTILE = "</pre><script>alert('x')</script> & \x1b[31m\x00\ufffe \U0001f3d6\nsecond line"
REASON = "the ranks are gone <since> then"
STARTED = datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=1)))
CASES = build_cases(2)
FACTS = {
    "torch": tuple(
        RankFacts(rank, f"host<{rank}>", "a GPU", "nccl", (("torch", "2.13"), ("CUDA", f"12.{rank}")))
        for rank in range(2)
    )
}


def verdict(case: Any, error: float, *failures: str) -> Verdict:
    calls = tuple(("dtensor", p, math.inf if p == 3.0 else 1.5) for p in NORM_TYPES)
    return Verdict(case, failures, error, calls, tuple(math.inf for _ in calls), error)


def run() -> SuiteRun:
    """The first case fails on torch, the second differs between platforms, the third was not run on mindspore."""
    results = [
        Result(case, {name: verdict(case, 1e-8) for name in PLATFORMS}, {}, dict.fromkeys(PLATFORMS, 0.25))
        for case in CASES
    ]
    first, second, third = results[:3]
    first.verdicts["torch"] = verdict(first.case, 0.125, HOSTILE, "and more")
    first.failures["torch"] = (HOSTILE, "and more")
    second.failures["between platforms"] = ("1.5 and 1.25",)
    del third.verdicts["mindspore"], third.seconds["mindspore"]
    third.not_run["mindspore"] = REASON
    return SuiteRun(PLATFORMS, tuple(results), FACTS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "made" / "here"
    settings = Settings(PLATFORMS, "cuda", report=str(folder), launcher="torchrun")
    paths = write_report(build_document(settings, run(), STARTED), str(folder))
    assert sorted(path.name for path in paths) == ["junit.xml", "parity.html", "parity.json"]
    return folder


@pytest.fixture(scope="module")
def document(written: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((written / "parity.json").read_text(), parse_constant=refuse)


def test_json_counts_and_verdicts(document: Any) -> None:
    assert document["schema"] == SCHEMA
    assert document["verdict"] == "failed"
    assert (document["passed"], document["failed"], document["not_run"]) == (len(CASES) - 3, 2, 1)
    assert [case["verdict"] for case in document["cases"][:4]] == ["failed", "failed", "not run", "passed"]
    first, second, third = document["cases"][:3]
    assert first["platforms"]["torch"]["failures"] == [HOSTILE, "and more"]
    assert first["platforms"]["mindspore"]["verdict"] == "passed"
    assert second["between_platforms"] == ["1.5 and 1.25"]
    assert third["platforms"]["mindspore"] == {
        "verdict": "not run",
        "seconds": 0.0,
        "failures": [],
        "reason": REASON,
        "largest_error": "nan",
        "norms": [],
    }


def test_json_describes_a_case(document: Any) -> None:
    case = next(each for each in document["cases"] if each["parallelism"] == "tp+fsdp")
    assert (case["variant"], case["world_size"], case["meshes"]) == (
        "float32",
        2,
        [[["dp", 2], ["tp", 1]]],
    )
    found = case["platforms"]["torch"]
    assert (found["seconds"], found["largest_error"]) == (0.25, 1e-8)
    assert found["norms"][0] == {"form": "dtensor", "p": 2.0, "norm": 1.5, "expected": "inf"}
    assert [norm["p"] for norm in found["norms"]] == [2.0, 1.0, 3.0, "inf", 0.0, "-inf", 0.5]


def test_json_describes_the_environment(document: Any) -> None:
    found = document["environment"]
    assert document["started"] == "2030-01-02T02:04:05+00:00"
    assert (found["launcher"], found["device"]) == ("torchrun", "cuda")
    torch, mindspore = found["platforms"]["torch"], found["platforms"]["mindspore"]
    assert torch["backend"] == "nccl"
    assert torch["versions"] == {"torch": "2.13", "CUDA": "12.0 and 12.1"}
    assert torch["ranks"][1] == {"rank": 1, "host": "host<1>", "device": "a GPU"}
    assert mindspore == {"backend": "", "versions": {}, "ranks": []}


def test_a_passed_run_says_so(tmp_path: Path) -> None:
    good = replace(run(), results=run().results[3:])
    document = build_document(Settings(PLATFORMS, "cpu"), good, STARTED)
    write_report(document, str(tmp_path))
    assert document["verdict"] == "passed"
    page = (tmp_path / "parity.html").read_text()
    assert '<span class="badge passed">passed</span>' in page
    assert "<h2>Failures</h2>" not in page
    assert "<h2>Not run</h2>" not in page


def test_ranks_that_never_came_are_a_report_too(tmp_path: Path) -> None:
    document = build_document(Settings(("torch",), "npu"), unrun_suite(("torch",), CASES, HOSTILE), STARTED)
    write_report(document, str(tmp_path))
    assert (document["verdict"], document["not_run"]) == ("failed", len(CASES))
    assert JUnitXml.fromfile(str(tmp_path / "junit.xml")).errors == len(CASES)
    assert (tmp_path / "parity.html").read_text().count("second line") == 1, "a reason is told once"


def test_junit_by_a_parser_of_its_format(written: Path) -> None:
    xml = JUnitXml.fromfile(str(written / "junit.xml"))
    suites = {suite.name: suite for suite in xml}
    assert list(suites) == ["parity: torch", "parity: mindspore", "parity: between platforms"]
    found = {name: (suite.tests, suite.failures, suite.errors) for name, suite in suites.items()}
    assert found == {
        "parity: torch": (len(CASES), 1, 0),
        "parity: mindspore": (len(CASES), 0, 1),
        "parity: between platforms": (len(CASES), 1, 1),
    }
    assert (xml.tests, xml.failures, xml.errors) == (3 * len(CASES), 2, 2)
    torch = list(suites["parity: torch"])
    assert [case.name for case in torch] == [case.name for case in CASES]
    assert torch[0].classname == "parity.torch.plain"
    assert torch[0].time == 0.25
    (failure,) = torch[0].result
    assert failure.message.startswith("</pre><script>alert('x')</script> & \ufffd[31m\ufffd\ufffd")
    assert failure.text.endswith("second line\nand more")
    (error,) = list(suites["parity: mindspore"])[2].result
    assert (error.type, error.text) == ("NotRun", REASON)
    properties = {each.name: each.value for each in suites["parity: torch"].properties()}
    assert properties["CUDA"] == "12.0 and 12.1"
    assert properties["rank 1"] == "host<1>, a GPU"
    assert properties["launcher"] == "torchrun"


def test_junit_of_strange_names(tmp_path: Path) -> None:
    case = replace(CASES[0], name=f"a {HOSTILE}", parallelism="<\x00>")
    write_report(
        build_document(Settings(("torch",), "cpu"), unrun_suite(("torch",), [case], "gone"), STARTED),
        str(tmp_path),
    )
    (suite,) = JUnitXml.fromfile(str(tmp_path / "junit.xml"))
    (found,) = suite
    assert found.name.startswith("a </pre><script>alert('x')</script> & \ufffd[31m\ufffd\ufffd")
    assert found.classname == "parity.torch.<\ufffd>"


# What the XML schema of the format's readers allows, in the order in which it has to come.
CHILDREN = {
    "testsuites": ["testsuite"],
    "testsuite": ["properties", "testcase"],
    "properties": ["property"],
    "testcase": ["error", "failure"],
    "property": [],
    "failure": [],
    "error": [],
}
ATTRIBUTES = {
    "testsuite": {"name", "tests", "failures", "errors", "time"},
    "testcase": {"name", "classname", "time"},
    "property": {"name", "value"},
    "failure": {"message", "type"},
    "error": {"message", "type"},
}


def test_junit_keeps_to_the_schema(written: Path) -> None:
    root = ET.parse(written / "junit.xml").getroot()
    assert root.tag == "testsuites"
    for element in root.iter():
        allowed = CHILDREN[element.tag]
        order = [allowed.index(child.tag) for child in element]
        assert order == sorted(order)
        assert set(element.attrib) >= ATTRIBUTES.get(element.tag, set())
    for suite in root:
        counted = [suite.findall(f"testcase{path}") for path in ("", "/failure", "/error")]
        assert [len(found) for found in counted] == [
            int(suite.attrib[name]) for name in ("tests", "failures", "errors")
        ]


class Page(HTMLParser):
    """The tags, their attributes and the text; fails on tags that are not closed in order."""

    VOID = ("meta",)

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    return Page((written / "parity.html").read_text(encoding="utf-8"))


def test_page_escapes_and_needs_nothing_else(page: Page) -> None:
    names = {tag for tag, _ in page.tags}
    assert names.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not any({"src", "href", "onclick", "style"} & attributes.keys() for _, attributes in page.tags)
    text = "".join(page.text)
    assert "</pre><script>alert('x')</script> &" in text
    assert "host<1>" in text
    assert "url(" not in text
    assert "@import" not in text


def test_page_puts_failures_before_tables(page: Page) -> None:
    text = " ".join("".join(page.text).split())
    order = [
        f"{len(CASES) - 3} passed, 2 failed, 1 not run, of {len(CASES)} cases on torch and mindspore",
        "Failures",
        CASES[0].name,
        "second line and more",
        CASES[1].name,
        "1.5 and 1.25",
        "Not run",
        "1 cases on mindspore",
        REASON,
        "torch: passed cases, and the largest relative error of a norm",
        "mindspore: passed cases, and the largest relative error of a norm",
        "Environment",
        "torch 2.13, CUDA 12.0 and 12.1",
        "All cases",
    ]
    positions = [text.find(each) for each in order]
    assert -1 not in positions, dict(zip(order, positions, strict=True))
    assert positions == sorted(positions)


def test_page_has_the_largest_error_by_parallelism_and_dtype(written: Path) -> None:
    source = (written / "parity.html").read_text()
    row = source.partition("<tr><th>plain</th>")[2].partition("</tr>")[0]
    cells = [" ".join("".join(Page(f"<td{cell}").text).split()) for cell in row.split("<td")[1:]]
    assert cells == ["0 of 1 1.2e-01", *["1 of 1 1.0e-08"] * 4, "2 of 2 1.0e-08"]
    classes = [cell.partition('"')[2].partition('"')[0] for cell in row.split("<td")[1:]]
    assert classes == ["failed", *["passed"] * 5]
    # The case of the third result was not run on mindspore.
    mindspore = source.partition("<h2>mindspore")[2].partition("<tr><th>plain</th>")[2]
    assert mindspore.count('class="open"') == 2, "in the table of parallelisms and in that of all cases"


def test_error_text() -> None:
    assert [error_text(each) for each in (0.0, 1.25e-8, "nan", "inf")] == ["0.0e+00", "1.2e-08", "-", "inf"]

"""Each rule fires, alone, where its problem is, and not beside it."""

from __future__ import annotations

import string
from dataclasses import replace

import pytest

from hyper_parallel.cli.doctor.findings import Diagnosis, Findings
from hyper_parallel.cli.doctor.rules import RULES, find_problems
from tests.cli import doctor_device_cases, doctor_software_cases
from tests.cli.doctor_device_cases import NO_SYMBOL, NPU_MINDSPORE
from tests.cli.doctor_findings import (
    ASCEND,
    HEALTHY,
    Case,
    checked,
    importing,
    job,
    with_mindspore,
    with_npus,
)
from tests.cli.doctor_software_cases import SEVERAL

CASES = doctor_software_cases.CASES | doctor_device_cases.CASES
EACH = [
    pytest.param(name, case, id=f"{name}-{number}")
    for name, cases in CASES.items()
    for number, case in enumerate(cases)
]


def fired(findings: Findings) -> set[str]:
    return {problem.rule for problem in find_problems(findings)}


def test_every_rule_has_cases() -> None:
    assert list(CASES) == [rule.name for rule in RULES]


def test_a_healthy_machine_has_no_problems() -> None:
    assert fired(HEALTHY) == fired(with_npus()) == fired(NPU_MINDSPORE) == fired(with_mindspore()) == set()


@pytest.mark.parametrize(("name", "case"), EACH)
def test_fires_alone_and_says_what_to_do(name: str, case: Case) -> None:
    problems = find_problems(case.fires)
    assert {problem.rule for problem in problems} == {name}
    said = "\n".join(f"{problem.problem}\n{problem.remedy}" for problem in problems)
    for words in case.words:
        assert words in said
    assert ".." not in said.replace("...", "")


@pytest.mark.parametrize(("name", "case"), EACH)
def test_is_silent_where_the_problem_is_not(name: str, case: Case) -> None:
    assert name not in fired(case.silent)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_sound(rule) -> None:
    assert rule.severity in ("error", "warning")
    before = [each.name for each in RULES[: RULES.index(rule)]]
    assert set(rule.unless) <= set(before)
    given = {key for case in CASES[rule.name] for fields in rule.condition(case.fires) for key in fields}
    wanted = {
        key for text in (rule.problem, rule.remedy) for _, key, _, _ in string.Formatter().parse(text) if key
    }
    assert wanted <= given


# ---- several at once


def test_two_failed_calls_on_one_device_are_one_problem() -> None:
    (first,) = checked("rank 0: broken").checks
    findings = replace(HEALTHY, checks=(first, replace(first, call="clip_grad_norm_")))
    (problem,) = find_problems(findings)
    assert problem.problem.startswith("all_reduce")
    elsewhere = replace(findings, checks=(*findings.checks, replace(first, platform="mindspore")))
    assert len(find_problems(elsewhere)) == 2


def test_an_explained_problem_is_not_reported_again() -> None:
    denied = importing(None, devices=replace(ASCEND, denied=("/dev/davinci0",)))
    assert fired(denied) == {"npu_no_access"}
    assert fired(importing(NO_SYMBOL, packages={"torch_npu": "2.8.0"})) == {"torch_npu_version"}


def test_each_occurrence_is_a_problem_of_its_own() -> None:
    problems = find_problems(job(GLOO_SOCKET_IFNAME="a", NCCL_SOCKET_IFNAME="b"))
    assert [problem.rule for problem in problems] == ["interface_missing"] * 2


def test_errors_come_first_and_decide() -> None:
    warned = replace(HEALTHY, selection=SEVERAL)
    both = replace(warned, machine=replace(warned.machine, variables={"RANK": "x"}))
    assert [problem.severity for problem in find_problems(both)][-1] == "warning"
    assert Diagnosis(warned, find_problems(warned)).healthy
    assert not Diagnosis(both, find_problems(both)).healthy
    assert Diagnosis(HEALTHY, ()).healthy

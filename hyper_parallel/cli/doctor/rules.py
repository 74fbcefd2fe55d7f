"""All rules in their order, and what they say of the findings."""

from __future__ import annotations

from hyper_parallel.cli.doctor import ascend_rules, launch_rules, process_rules, software_rules
from hyper_parallel.cli.doctor.findings import Findings, Problem
from hyper_parallel.cli.doctor.rule import ERROR

RULES = (*launch_rules.RULES, *software_rules.RULES, *ascend_rules.RULES, *process_rules.RULES)


def find_problems(findings: Findings) -> tuple[Problem, ...]:
    """What the rules say, errors first."""
    problems: list[Problem] = []
    for rule in RULES:
        if not any(problem.rule in rule.unless for problem in problems):
            for fields in rule.condition(findings):
                sentences = (rule.problem.format_map(fields), rule.remedy.format_map(fields))
                problems.append(Problem(rule.name, rule.severity, *sentences))
    return tuple(sorted(problems, key=lambda problem: problem.severity != ERROR))

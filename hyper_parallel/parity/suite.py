"""Runs cases on pools of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hyper_parallel.parity.cases import Case
from hyper_parallel.parity.checks import Verdict, compare, judge
from hyper_parallel.parity.pool import RankFailure, RankPool

CASE_TIMEOUT = 60.0
_WORKER = "hyper_parallel.parity.worker:run_case"


@dataclass(frozen=True, slots=True)
class Result:
    """One case: a verdict per platform that ran it, and everything that is wrong."""

    case: Case
    verdicts: dict[str, Verdict]
    failures: dict[str, tuple[str, ...]]


def run_on(pool: RankPool, case: Case, device_type: str) -> Verdict:
    """Run one case; a rank that raises, dies or stays silent becomes a failure of the case."""
    try:
        ranks = pool.run(_WORKER, case, device_type, timeout=CASE_TIMEOUT, label=case.name)
    except RankFailure as failure:
        return Verdict(case, (str(failure),), float("nan"), ())
    return judge(case, ranks)


def run_suite(
    platforms: Sequence[str], cases: Sequence[Case], device_type: str, progress: Callable[[str, Case], None]
) -> list[Result]:
    """Run ``cases`` on every platform, one pool of ranks after another, and compare.

    Args:
        platforms: names of entry points in ``hyper_parallel.platforms``.
        cases: cases of any world size; those of one size share a pool.
        device_type: where the tensors live.
        progress: called after each case.
    """
    verdicts: dict[str, dict[str, Verdict]] = {case.name: {} for case in cases}
    for platform in platforms:
        for world_size in sorted({case.world_size for case in cases}):
            with RankPool(platform, world_size) as pool:
                for case in cases:
                    if case.world_size == world_size:
                        verdicts[case.name][platform] = run_on(pool, case, device_type)
                        progress(platform, case)
    return [_result(case, verdicts[case.name]) for case in cases]


def _result(case: Case, verdicts: dict[str, Verdict]) -> Result:
    failures = {platform: verdict.failures for platform, verdict in verdicts.items() if verdict.failures}
    comparable = {platform: verdict for platform, verdict in verdicts.items() if verdict.norms}
    if len(comparable) > 1 and (differences := compare(comparable)):
        failures["between platforms"] = differences
    return Result(case, verdicts, failures)

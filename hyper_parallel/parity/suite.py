"""Runs cases on groups of ranks, forked here or started by a launcher."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

from hyper_parallel.parity.cases import Case
from hyper_parallel.parity.checks import Verdict, compare, judge
from hyper_parallel.parity.environment import RankFacts
from hyper_parallel.parity.pool import Interrupted, RankFailure, RankPool

CASE_TIMEOUT = 60.0
_WORKER = "hyper_parallel.parity.worker:run_case"
_DESCRIBE = "hyper_parallel.parity.environment:describe_rank"


class Ranks(Protocol):
    """A group of ranks that call functions together, such as ``RankPool``."""

    @property
    def ended(self) -> str | None:
        """Why nothing can run on these ranks any more; None while it can."""
        ...

    def run(self, target: str, *args: object, timeout: float, label: str) -> list[Any]:
        """Call ``target`` on every rank; the results in rank order.

        Raises:
            RankFailure: a rank raised, died or did not answer in time.
        """
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run was asked for. ``launcher`` is what started the ranks, ``timeout`` is for one case, in seconds."""

    platforms: tuple[str, ...]
    device_type: str
    timeout: float = CASE_TIMEOUT
    report: str | None = None
    launcher: str = "this command"


OpenRanks = Callable[[str, int], AbstractContextManager[Ranks]]


@dataclass(frozen=True, slots=True)
class Result:
    """One case: a verdict per platform that ran it, everything that is wrong, and why it did not run elsewhere."""

    case: Case
    verdicts: dict[str, Verdict]
    failures: dict[str, tuple[str, ...]]
    seconds: dict[str, float] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.failures and not self.not_run


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """All results, and for each platform what the ranks of the largest group ran on."""

    platforms: tuple[str, ...]
    results: tuple[Result, ...]
    ranks: dict[str, tuple[RankFacts, ...]]

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


def run_on(pool: Ranks, case: Case, device_type: str, timeout: float = CASE_TIMEOUT) -> Verdict:
    """Run one case; a rank that raises, dies or stays silent becomes a failure of the case.

    Raises:
        Interrupted: the ranks were told to end.
    """
    try:
        ranks = pool.run(_WORKER, case, device_type, timeout=timeout, label=case.name)
    except Interrupted:
        raise
    except RankFailure as failure:
        return Verdict(case, (str(failure),), math.nan, ())
    return judge(case, ranks)


def run_suite(
    settings: Settings,
    cases: Sequence[Case],
    progress: Callable[[str, Case], None],
    open_ranks: OpenRanks = RankPool,
) -> SuiteRun:
    """Run ``cases`` on every platform, one group of ranks after another, and compare. Ctrl-C leaves the rest not run.

    Args:
        settings: the platforms, which are names of entry points, where the tensors live, and the time-out.
        cases: cases of any world size; those of one size share a group of ranks.
        progress: called after each case.
        open_ranks: gives the ranks of a platform and world size.
    """
    records = {case.name: Result(case, {}, {}) for case in cases}
    facts: dict[str, tuple[RankFacts, ...]] = {}
    try:
        for platform, world_size in product(settings.platforms, sorted({case.world_size for case in cases})):
            group = [records[case.name] for case in cases if case.world_size == world_size]
            try:
                with open_ranks(platform, world_size) as ranks:
                    facts[platform] = _described(ranks, settings)
                    for record in group:
                        _run(ranks, record, platform, settings)
                        progress(platform, record.case)
            except RankFailure as failure:  # of the start; those of cases are recorded
                for record in group:
                    record.not_run.setdefault(platform, str(failure))
    except KeyboardInterrupt:
        for record, platform in product(records.values(), settings.platforms):
            if platform not in record.verdicts:
                record.not_run.setdefault(platform, "interrupted by SIGINT or SIGTERM")
    for record in records.values():
        _compare(record)
    return SuiteRun(settings.platforms, tuple(records.values()), facts)


def unrun_suite(platforms: tuple[str, ...], cases: Sequence[Case], reason: str) -> SuiteRun:
    """What there is to report if the ranks never came together."""
    results = tuple(Result(case, {}, {}, {}, dict.fromkeys(platforms, reason)) for case in cases)
    return SuiteRun(platforms, results, {})


def _described(ranks: Ranks, settings: Settings) -> tuple[RankFacts, ...]:
    return tuple(
        ranks.run(_DESCRIBE, settings.device_type, timeout=settings.timeout, label="describing the ranks")
    )


def _run(ranks: Ranks, record: Result, platform: str, settings: Settings) -> None:
    if ranks.ended is not None:
        record.not_run[platform] = ranks.ended
        return
    start = time.monotonic()
    try:
        verdict = run_on(ranks, record.case, settings.device_type, settings.timeout)
    except Interrupted as interruption:
        record.not_run[platform] = str(interruption)
        return
    record.seconds[platform] = time.monotonic() - start
    record.verdicts[platform] = verdict
    if verdict.failures:
        record.failures[platform] = verdict.failures


def _compare(record: Result) -> None:
    comparable = {platform: verdict for platform, verdict in record.verdicts.items() if verdict.norms}
    if len(comparable) > 1 and (differences := compare(comparable)):
        record.failures["between platforms"] = differences

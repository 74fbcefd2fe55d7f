"""The parity cases on real ranks: every backend against the oracle, and the backends against each other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hyper_parallel.parity.cases import Case, build_cases
from hyper_parallel.parity.checks import Verdict, compare
from hyper_parallel.parity.suite import run_on

if TYPE_CHECKING:
    from tests.conftest import Pools

BACKENDS = tuple(os.environ.get("HYPER_PARALLEL_TEST_BACKENDS", "torch,mindspore").split(","))
WORLD_SIZES = (1, 2, 3, 4)
CASES = [case for world_size in WORLD_SIZES for case in build_cases(world_size)]
# A mesh of three dims larger than 1 takes 8 ranks.
CASES += [case for case in build_cases(8) if case.parallelism == "3-d mesh"]


@pytest.fixture(scope="module")
def verdicts() -> dict[tuple[str, str], Verdict]:
    return {}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_oracle(
    backend: str, case: Case, pools: Pools, verdicts: dict[tuple[str, str], Verdict]
) -> None:
    verdict = run_on(pools.get(backend, case.world_size), case, "cpu")
    verdicts[backend, case.name] = verdict
    assert verdict.failures == ()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backends_agree(case: Case, pools: Pools, verdicts: dict[tuple[str, str], Verdict]) -> None:
    for backend in BACKENDS:
        if (backend, case.name) not in verdicts:
            verdicts[backend, case.name] = run_on(pools.get(backend, case.world_size), case, "cpu")
    found = {backend: verdicts[backend, case.name] for backend in BACKENDS}
    assert {name: verdict.failures for name, verdict in found.items() if not verdict.norms} == {}
    assert compare(found) == ()

"""Random models on real ranks of both backends: meshes and their slices, placements, dtypes, missing gradients, orders.

What is right is found in float64 without the library, by the oracles of the contract suite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.contract.partial_cases import partial_cases
from tests.contract.rank_cases import cases
from tests.contract.stage_cases import Pipeline, pipelines
from tests.named_backends import BACKENDS
from tests.parity.random_models import FORMS, HOLDERS, MEMORY, Found, Job
from tests.unit.brute_force import norm_of

if TYPE_CHECKING:
    from tests.conftest import Pools

pytestmark = pytest.mark.timeout(300)

TOLERANCE = {"float64": 2e-6, "float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
DTYPES = [
    ("float32", "float64", "float16"),
    ("float32", "bfloat16", "float16"),
    ("float32", "bfloat16", "float32"),
]
ORDERS = [2.0, 2.0, 1.0, 3.0, 0.5, 0.0, -1.0, math.inf, -math.inf]


@st.composite
def jobs(draw: st.DrawFn, world_size: int) -> Job:
    models = [cases(sizes=[world_size]), partial_cases(sizes=[world_size])]
    if world_size > 1:
        models += [pipelines(missing=missing, sizes=[world_size]) for missing in (False, True)]
    case = draw(draw(st.sampled_from(models)))
    alike = not isinstance(case, Pipeline) and all(len(set(spec.present)) == 1 for spec in case.specs)
    return Job(
        case,
        draw(st.sampled_from(ORDERS)),
        draw(st.sampled_from([1.0, 0.25, 0.0, math.inf])),
        draw(st.sampled_from(FORMS if alike else FORMS[:-1])),
        draw(st.sampled_from(HOLDERS)),
        draw(st.sampled_from(MEMORY)),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([None, False])),
        draw(st.booleans()),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 7, 4 * 2**20])),
        draw(st.booleans()),
    )


def drawn(world_size: int, number: int, start: int) -> list[Job]:
    """The same ones in every run."""
    found: list[Job] = []

    @seed(start)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(jobs(world_size))
    def collect(job: Job) -> None:
        found.append(job)

    collect()
    return found


def mistakes(job: Job, ranks: Sequence[Found]) -> Iterator[str]:
    """What is wrong on any rank."""
    bits: dict[Any, set[float]] = {}
    for rank, found in enumerate(ranks):
        if found.error:
            yield f"rank {rank} raised {found.error}"
            continue
        specs = job.specs(rank)
        expected = norm_of(job.case.counted(rank), job.p)
        dtype = promoted({job.dtype(spec) for spec in specs if spec.present[rank]})
        shown = math.inf if dtype == "float16" and expected > 65504 else expected
        if found.dtype != dtype or not np.allclose(found.norm, shown, rtol=TOLERANCE[dtype], atol=0):
            yield f"norm {found.norm!r} in {found.dtype} on rank {rank}, expected {expected!r} in {dtype}"
        if not isinstance(job.case, Pipeline) or job.case.rooted:
            group = "everyone" if isinstance(job.case, Pipeline) else job.case.together(rank)
            bits.setdefault((group, dtype), set()).add(found.norm)
        factor = 1.0 if job.form == "total" else min(1.0, job.max_norm / (expected + 1e-6))
        yield from wrong_gradients(job, rank, found, factor)
    yield from (f"several norms for {group}: {norms}" for group, norms in bits.items() if len(norms) > 1)


def wrong_gradients(job: Job, rank: int, found: Found, factor: float) -> Iterator[str]:
    for index, (spec, gradient) in enumerate(zip(job.specs(rank), found.gradients, strict=True)):
        right = spec.local(rank) * factor
        if (gradient is not None) != spec.present[rank]:
            yield f"tensor {index} on rank {rank}: a gradient vanished or appeared"
        elif gradient is not None and (
            gradient.shape != right.shape
            or not np.allclose(gradient, right, rtol=TOLERANCE[job.dtype(spec)], atol=1e-7)
        ):
            yield f"tensor {index} on rank {rank} is {gradient}, expected {right}"


def promoted(dtypes: set[str]) -> str:
    """The dtype that arithmetic between all of them gives; float32 for none."""
    if len(dtypes) == 1:
        return dtypes.pop()
    return "float64" if "float64" in dtypes else "float32"


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_models_on_real_ranks(backend: str, world_size: int, pools: Pools) -> None:
    models = drawn(world_size, 60, world_size)
    ranks = pools.get(backend, world_size).run("tests.parity.random_models:clip_all", models, timeout=120)
    wrong = [
        f"{job}:\n  {text}"
        for job, *found in zip(models, *ranks, strict=True)
        for text in mistakes(job, found)
    ]
    assert not wrong, "\n\n".join(wrong)

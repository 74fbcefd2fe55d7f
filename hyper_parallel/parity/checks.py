"""Compares what the ranks of each backend found with the oracle, and the backends with each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.parity import oracle
from hyper_parallel.parity.cases import MAX_NORM, Case
from hyper_parallel.parity.worker import Outcome

RELATIVE = 1e-6
"""How far a norm may be from float64, before it is rounded to the dtype it is returned in."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One case on one backend: what is wrong, and the largest relative error of its float32 norms.

    ``norms`` are form, norm type and the norm on rank 0 of each call; ``expected`` are the oracle's. ``error`` is the
    largest relative error in any dtype.
    """

    case: Case
    failures: tuple[str, ...]
    largest_error: float
    norms: tuple[tuple[str, float, float], ...]
    expected: tuple[float, ...] = ()
    error: float = math.nan


def judge(case: Case, ranks: Sequence[Sequence[Outcome]]) -> Verdict:
    """Judge the outcomes of all ranks, which made the same calls in the same order."""
    failures: list[str] = []
    errors, errors_in_float32 = [0.0], [0.0]
    norms, expectations = [], []
    for outcomes in zip(*ranks, strict=True):
        form, p = outcomes[0].form, outcomes[0].norm_type
        expected = oracle.total_norm(case, p)
        found = [outcome.norm for outcome in outcomes]
        norms.append((form, p, found[0]))
        expectations.append(expected)
        where = f"{case.name}, {form}, p={p:g}"
        dtypes = [_result_dtype(case, rank) for rank in range(case.world_size)]
        if any(
            len({norm for norm, dtype in zip(found, dtypes, strict=True) if dtype == each}) > 1
            for each in set(dtypes)
        ):
            failures.append(f"{where}: the ranks disagree on the norm: {found}")
        for rank, (norm, dtype) in enumerate(zip(found, dtypes, strict=True)):
            if not _close(case, norm, expected, dtype):
                failures.append(f"{where}: norm {norm!r} on rank {rank}, expected {expected!r}")
            errors.append(_relative(norm, expected))
            if dtype == "float32":
                errors_in_float32.append(errors[-1])
        failures.extend(f"{where}: {text}" for text in _wrong_gradients(case, expected, outcomes))
    return Verdict(
        case, tuple(failures), max(errors_in_float32), tuple(norms), tuple(expectations), max(errors)
    )


def compare(verdicts: dict[str, Verdict]) -> tuple[str, ...]:
    """Where the norms of two backends differ by more than both may be off."""
    failures = []
    (first, reference), *others = verdicts.items()
    for name, verdict in others:
        for (form, p, here), (_, _, there) in zip(reference.norms, verdict.norms, strict=True):
            if not _close(reference.case, there, here, _result_dtype(reference.case, 0), 2):
                failures.append(f"{reference.case.name}, {form}, p={p:g}: {first} {here!r}, {name} {there!r}")
    return tuple(failures)


def _result_dtype(case: Case, rank: int) -> str:
    """The promoted dtype of the gradients on a rank, float32 without any."""
    held = {t.dtype for t in case.tensors if case.holds(t, rank) and rank not in t.missing_on}
    return held.pop() if len(held) == 1 else "float32"


def _close(case: Case, found: float, expected: float, dtype: str, times: int = 1) -> bool:
    if not math.isfinite(expected):
        return found == expected
    allowed = oracle.tolerance(np.asarray(expected), dtype, RELATIVE) + oracle.rounding(case)
    return bool(abs(found - expected) <= times * allowed)


def _relative(found: float, expected: float) -> float:
    return 0.0 if found == expected else abs(found - expected) / max(abs(expected), 1e-300)


def _wrong_gradients(case: Case, norm: float, outcomes: Sequence[Outcome]) -> Iterator[str]:
    for rank, outcome in enumerate(outcomes):
        for index, tensor in enumerate(case.tensors):
            found = outcome.gradients[index]
            missing = rank in tensor.missing_on or not case.holds(tensor, rank)
            if (found is None) != missing:
                yield f"tensor {index} on rank {rank}: a gradient {'vanished' if found is None else 'appeared'}"
            if found is None or missing:
                continue
            expected = oracle.clipped(oracle.local_gradient(case, index, rank), norm, MAX_NORM)
            if found.shape != expected.shape:
                yield f"tensor {index} on rank {rank}: shape {found.shape}, expected {expected.shape}"
            elif not np.all(np.abs(found - expected) <= oracle.tolerance(expected, tensor.dtype)):
                worst = np.abs(found - expected).max()
                yield f"tensor {index} on rank {rank}: a clipped gradient is off by {worst:.3g}"

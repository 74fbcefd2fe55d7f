"""The packed buffer: ``[statistic, nan, error, stale, digest of the plan, digest of what is missing]``.

A digest travels as bits beside their complements: if ranks differ in a bit, both it and its complement come back
above zero, under SUM as well as under MAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hyper_parallel.core.plan import DIGEST_BITS

NAN, ERROR, STALE, PLAN = 1, 2, 3, 4
PRESENCE = PLAN + 2 * DIGEST_BITS
"""Positions; a digest begins at PLAN and at PRESENCE, the statistic is the first number."""


@lru_cache(maxsize=256)
def header(error: bool, stale: bool, plan: int, presence: int) -> tuple[float, ...]:
    """What follows the statistic and the NaN flag."""
    return (float(error), float(stale), *_bits(plan), *_bits(presence))


def disagree(reduced: Sequence[float], start: int) -> bool:
    """Whether some rank sent another digest than the others."""
    bits = reduced[start : start + DIGEST_BITS]
    return any(a > 0 and b > 0 for a, b in zip(bits, reduced[start + DIGEST_BITS :], strict=False))


def _bits(digest: int) -> tuple[float, ...]:
    bits = [float(digest >> position & 1) for position in range(DIGEST_BITS)]
    return (*bits, *(1 - bit for bit in bits))

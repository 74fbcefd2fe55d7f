"""The packed buffer: ``[statistic, nan, error, stale, announce, digest of the plan, digest of what is missing]``.

Where several pipeline stages meet, a digest of each stage's tensors follows; a rank sends that of its own stage.

A digest travels as bits beside their complements: if ranks differ in a bit, both it and its complement come back
above zero, under SUM as well as under MAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hyper_parallel.core.plan import DIGEST_BITS

NAN, ERROR, STALE, ANNOUNCE, PLAN = 1, 2, 3, 4, 5
_DIGEST = 2 * DIGEST_BITS
PRESENCE = PLAN + _DIGEST
_STAGES = PRESENCE + _DIGEST
"""Positions; a digest begins at PLAN, at PRESENCE and for each stage, the statistic is the first number."""


def flags(error: bool, stale: bool, announce: bool) -> tuple[float, ...]:
    """What follows the statistic and the NaN flag; digests follow in their turn."""
    return (float(error), float(stale), float(announce))


@lru_cache(maxsize=256)
def digests(plan: int, presence: int, own: int, stage: int, num_stages: int) -> tuple[float, ...]:
    """The digests; ``own`` is that of the tensors of ``stage``, and is sent if there are several stages."""
    if num_stages == 1:
        return (*bits(plan), *bits(presence))
    before, after = (0.0,) * (stage * _DIGEST), (0.0,) * ((num_stages - stage - 1) * _DIGEST)
    return (*bits(plan), *bits(presence), *before, *bits(own), *after)


def stages_apart(reduced: Sequence[float]) -> list[int]:
    """The stages whose ranks sent different digests."""
    starts = range(_STAGES, len(reduced), _DIGEST)
    return [stage for stage, start in enumerate(starts) if disagree(reduced, start)]


def disagree(reduced: Sequence[float], start: int) -> bool:
    """Whether some rank sent another digest than the others."""
    bits = reduced[start : start + DIGEST_BITS]
    return any(a > 0 and b > 0 for a, b in zip(bits, reduced[start + DIGEST_BITS :], strict=False))


def bits(digest: int) -> tuple[float, ...]:
    """A digest as it travels."""
    ones = [float(digest >> position & 1) for position in range(DIGEST_BITS)]
    return (*ones, *(1 - one for one in ones))

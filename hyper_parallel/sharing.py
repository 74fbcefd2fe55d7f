"""Which pipeline stages share a parameter; asked once, and again whenever some stage has changed its mind."""

from __future__ import annotations

from collections import Counter

from hyper_parallel.core.plan import ReductionPlan, digest_bits
from hyper_parallel.core.union import Ranks
from hyper_parallel.failures import gather
from hyper_parallel.interface import Platform

# How many stages share each key, and a digest of who holds what, by the ranks that asked and the keys this rank
# declared. Whoever knows of a change has another digest than the others, or none yet, and all of them ask again.
_stages: dict[tuple[tuple[Ranks, ...], tuple[str, ...]], tuple[dict[str, int], int]] = {}


def known_stages(plan: ReductionPlan) -> tuple[dict[str, int], int] | None:
    """What was learnt last: the number of stages by key, and the digest of who holds what."""
    return _stages.get((plan.stage_steps, plan.shared))


def learn_stages(plan: ReductionPlan, platform: Platform) -> None:
    """Ask all stages which keys they hold, and keep how many hold each of this rank's own.

    Collectives: one gather over the stages.
    """
    found = gather(platform, plan.stage_steps, (plan.stage, plan.shared))
    holders = {(stage, key) for _, (stage, keys) in found for key in keys}
    stages = dict(Counter(key for _, key in holders if key in plan.shared))
    _stages[plan.stage_steps, plan.shared] = stages, digest_bits(str(sorted(holders))) if holders else 0


def forget_stages() -> None:
    """Ask anew in the next call."""
    _stages.clear()

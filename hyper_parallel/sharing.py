"""Which pipeline stages share a parameter; asked once, and again whenever some stage has changed its mind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from hyper_parallel.core.plan import ReductionPlan, digest_bits
from hyper_parallel.failures import gather
from hyper_parallel.interface import Platform

# How many stages share each key, and a digest of who holds what. Whoever knows of a change has another digest than the
# others, or none yet, and all of them ask again. It is kept by what this rank declared, and as which stage, so that
# equal digests are true; and by the ranks of the stage, as all of them have to ask in the same call.
_stages: dict[Hashable, tuple[dict[str, int], int]] = {}


def _key(plan: ReductionPlan) -> Hashable:
    return plan.stage_steps, plan.stage, tuple(part.copy_steps for part in plan.parts), plan.shared


def known_stages(plan: ReductionPlan) -> tuple[dict[str, int], int] | None:
    """What was learnt last: the number of stages by key, and the digest of who holds what."""
    return _stages.get(_key(plan))


def learn_stages(plan: ReductionPlan, platform: Platform) -> None:
    """Ask all stages which keys they hold, and keep how many hold each of this rank's own.

    Collectives: one gather over the stages.
    """
    found = gather(platform, plan.stage_steps, (plan.stage, plan.shared))
    holders = {(stage, key) for _, (stage, keys) in found for key in keys}
    stages = dict(Counter(key for _, key in holders if key in plan.shared))
    _stages[_key(plan)] = stages, digest_bits(str(sorted(holders))) if holders else 0

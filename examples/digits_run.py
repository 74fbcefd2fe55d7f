"""One training from start to end on one backend: starts the ranks, asks them for a few steps at a time, keeps count."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import digits_reference
import numpy as np
import numpy.typing as npt
from digits_data import Digits, Settings

from hyper_parallel.parity.pool import RankPool

REFERENCE = "NumPy float64"

# Few enough for a bar that moves, enough to make the cost of a call small.
_STEPS_PER_CALL = 5
_CALL_TIMEOUT = 120.0


@dataclass(slots=True)
class Run:
    """What a training has come to so far: one loss and one norm (before clipping) a step, one accuracy an epoch."""

    name: str
    max_norm: float
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    uneven_steps: list[int] = field(default_factory=list)
    """Steps in which not all ranks were given the same bits as the norm. There must not be any."""

    def clipped(self, steps: slice = slice(None)) -> float:
        """The share of steps whose gradient was clipped."""
        return float(np.mean(np.array(self.norms[steps]) > self.max_norm))

    def differences(self, other: Run) -> npt.NDArray[np.float64]:
        """How far the norms of both lie apart in each step, relative to the larger one."""
        mine, theirs = np.array(self.norms), np.array(other.norms)
        with np.errstate(invalid="ignore"):
            difference: npt.NDArray[np.float64] = np.abs(mine - theirs) / np.maximum(mine, theirs)
        return difference


Watcher: TypeAlias = Callable[[Run], None]


def train_reference(settings: Settings, digits: Digits) -> Run:
    """The training in this process, in float64."""
    start = time.monotonic()
    losses, norms, accuracy = digits_reference.train(settings, digits)
    return Run(REFERENCE, settings.max_norm, losses, norms, [accuracy], time.monotonic() - start)


def train(platform: str, settings: Settings, digits: Digits, watch: Watcher) -> Run:
    """The training in ``settings.world_size`` processes; ``watch`` is shown the run whenever it has got on.

    Raises:
        hyper_parallel.parity.pool.RankFailure: a rank raised, died, or hung.
    """
    run = Run(platform, settings.max_norm)
    start = time.monotonic()
    with RankPool(platform, settings.world_size) as pool:
        pool.run("digits_rank:set_up", platform, settings, digits, timeout=_CALL_TIMEOUT)
        per_epoch = digits.steps_per_epoch(settings)
        for first in range(0, settings.epochs * per_epoch, per_epoch):
            for step in range(first, first + per_epoch, _STEPS_PER_CALL):
                last = min(step + _STEPS_PER_CALL, first + per_epoch)
                _record(run, pool.run("digits_rank:train", step, last, timeout=_CALL_TIMEOUT))
                run.seconds = time.monotonic() - start
                watch(run)
            correct = sum(pool.run("digits_rank:count_correct", timeout=_CALL_TIMEOUT))
            run.accuracies.append(correct / len(digits.test))
            watch(run)
    run.seconds = time.monotonic() - start
    return run


def _record(run: Run, by_rank: list[list[tuple[float, float]]]) -> None:
    for ranks in zip(*by_rank, strict=True):
        losses, norms = zip(*ranks, strict=True)
        # Compared as bytes: a NaN is unequal to itself.
        if len({np.float64(norm).tobytes() for norm in norms}) > 1:
            run.uneven_steps.append(len(run.norms))
        run.losses.append(float(np.mean(losses)))
        run.norms.append(norms[0])

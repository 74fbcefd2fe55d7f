"""How the suite reaches a framework: through the entry-point group ``hyper_parallel.local_ranks`` alone.

An entry point names a module (or an object) that brings ranks of its framework together. Ranks come from two
sources: ``rank_server`` forks them on this machine, or a launcher such as ``torchrun`` has started them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

_GROUP = "hyper_parallel.local_ranks"


class DeviceMissing(RuntimeError):  # noqa: N818  its message is all that a user is told
    """The machine lacks the device that was asked for, or the framework cannot use it."""


class LocalRanks(Protocol):
    """What an entry point of ``hyper_parallel.local_ranks`` names."""

    has_scheduler: bool
    """Whether one more process, which computes nothing, has to bring the ranks together."""

    def prepare(self) -> None:
        """Import the framework and run nothing; called once, in the process that is then forked."""

    def join(self, rank: int, world_size: int, port: int, timeout: float) -> None:
        """In a forked process: join the group of all ranks at ``127.0.0.1:port``. Rank -1 is the scheduler."""

    def leave(self) -> None:
        """In a rank that is no longer needed: leave the group; of forked ranks, the slow ones are killed."""


class LaunchedRanks(LocalRanks, Protocol):
    """What an entry point has besides if its ranks can also come from a launcher."""

    def join_launched(self, device_type: str, timeout: float) -> None:
        """In a process of a launcher: take this rank's device and join the group of all ranks.

        In the scheduler's process, which some launchers start, too: return when the ranks are done. ``timeout`` is
        for joining and for collectives, in seconds.

        Raises:
            DeviceMissing: before joining, and in the scheduler as well, which would wait for the ranks.
        """

    def describe(self, device_type: str) -> Mapping[str, str]:
        """In a rank: ``device`` (its name), ``backend`` (of the group), and versions of libraries beneath."""


def find_local_ranks(platform: str) -> LocalRanks:
    """Load the entry point of this name.

    Raises:
        LookupError: none has this name; says which are installed.
    """
    installed = {entry.name: entry for entry in entry_points(group=_GROUP)}
    if platform not in installed:
        raise LookupError(f"no entry point {platform!r} in group {_GROUP!r}; installed: {sorted(installed)}")
    return cast(LocalRanks, installed[platform].load())


def find_launched_ranks(platform: str) -> LaunchedRanks:
    """Load the entry point of this name.

    Raises:
        LookupError: none has this name, or it cannot join the ranks of a launcher.
    """
    found = find_local_ranks(platform)
    if not hasattr(found, "join_launched"):
        raise LookupError(
            f"platform {platform!r} has no join_launched, so it cannot run on a launcher's ranks"
        )
    return cast(LaunchedRanks, found)


def call(target: str, args: Sequence[object]) -> Any:
    """Call ``package.module:function``."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(*args)

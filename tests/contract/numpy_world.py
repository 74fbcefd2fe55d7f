"""All ranks of a job in one process: one thread per rank, collectives that meet in memory.

A collective that not all of its ranks enter, or that they enter with different arguments, fails on every rank with
a message that says who is where; nothing waits longer than the time-out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Ranks: TypeAlias = tuple[int, ...]


class CollectiveError(AssertionError):
    """The ranks did not enter the same collectives in the same order."""


@dataclass(frozen=True)
class Call:
    """One collective as one rank entered it; ``what`` must be the same on all of its ranks."""

    what: tuple[Any, ...]
    ranks: Ranks


@dataclass
class Outcome:
    """What became of one rank: its value or its exception, and the collectives it entered."""

    value: Any = None
    error: BaseException | None = None
    calls: list[Call] = field(default_factory=list)

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


@dataclass
class _Meeting:
    entered: dict[int, tuple[Call, Any]] = field(default_factory=dict)
    results: list[Any] | None = None


class World:
    """``size`` ranks; ``groups`` are the rank tuples that have a process group, the whole world by default."""

    def __init__(self, size: int, groups: Iterable[Ranks] | None = None, timeout: float = 20.0) -> None:
        self.size = size
        self.groups = {tuple(range(size))} if groups is None else {tuple(group) for group in groups}
        self._timeout = timeout
        self._changed = threading.Condition()
        self._meetings: dict[tuple[Ranks, int], _Meeting] = {}
        self._waiting: dict[int, tuple[Call, _Meeting]] = {}
        self._outcomes = [Outcome() for _ in range(size)]
        self._running: set[int] = set()
        self._failure: str | None = None

    def run(self, function: Callable[[int], Any]) -> list[Outcome]:
        """Call ``function(rank)`` on every rank at once; the outcomes are in rank order."""
        self._outcomes = [Outcome() for _ in range(self.size)]
        self._meetings, self._waiting, self._failure = {}, {}, None
        self._running = set(range(self.size))
        threads = [threading.Thread(target=self._rank, args=(rank, function)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._outcomes

    def values(self, function: Callable[[int], Any]) -> list[Any]:
        """What ``function(rank)`` returns on every rank; the first error is raised."""
        return [outcome.get() for outcome in self.run(function)]

    def meet(self, call: Call, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Enter a collective with ``value``; returns ``combine`` of the values of all of its ranks, in order."""
        rank = current_rank()
        self._outcomes[rank].calls.append(call)
        if call.ranks not in self.groups or rank not in call.ranks:
            raise CollectiveError(f"rank {rank} has no process group of ranks {call.ranks}")
        with self._changed:
            meeting = self._enter(rank, call, value)
            while meeting.results is None:
                self._pause(rank, call, meeting)
        return combine(meeting.results)

    def _enter(self, rank: int, call: Call, value: Any) -> _Meeting:
        """Join the meeting that the others of the group are at with their n-th call, too."""
        number = sum(earlier.ranks == call.ranks for earlier in self._outcomes[rank].calls)
        meeting = self._meetings.setdefault((call.ranks, number), _Meeting())
        meeting.entered[rank] = (call, value)
        if len(meeting.entered) == len(call.ranks):
            if len({entered.what for entered, _ in meeting.entered.values()}) > 1:
                self._fail(
                    f"different collectives meet: { {r: c.what for r, (c, _) in meeting.entered.items()} }"
                )
            else:
                meeting.results = [meeting.entered[member][1] for member in call.ranks]
            self._changed.notify_all()
        return meeting

    def _pause(self, rank: int, call: Call, meeting: _Meeting) -> None:
        """Wait until something changes, and fail if nothing can."""
        self._waiting[rank] = (call, meeting)
        self._fail_if_stuck()
        if self._failure is None and not self._changed.wait(self._timeout):
            self._fail(f"timed out after {self._timeout} s: {self._where()}")
        self._waiting.pop(rank, None)
        if self._failure is not None:
            raise CollectiveError(self._failure)

    def _fail_if_stuck(self) -> None:
        stuck = all(meeting.results is None for _, meeting in self._waiting.values())
        if stuck and self._running and self._running == set(self._waiting) and self._failure is None:
            self._fail(f"no rank can go on: {self._where()}")

    def _where(self) -> str:
        waiting = "; ".join(
            f"rank {rank} waits in {call}" for rank, (call, _) in sorted(self._waiting.items())
        )
        ended = sorted(set(range(self.size)) - self._running)
        return f"{waiting}; ended: {ended}"

    def _fail(self, message: str) -> None:
        self._failure = message
        self._changed.notify_all()

    def _rank(self, rank: int, function: Callable[[int], Any]) -> None:
        _this_thread.world, _this_thread.rank = self, rank
        try:
            self._outcomes[rank].value = function(rank)
        except BaseException as error:  # noqa: BLE001  the test decides what to do with it
            self._outcomes[rank].error = error
        with self._changed:
            self._running.discard(rank)
            self._fail_if_stuck()
            self._changed.notify_all()


_this_thread = threading.local()


def current_world() -> World | None:
    """The world that this thread is a rank of."""
    return getattr(_this_thread, "world", None)


def current_rank() -> int:
    """The rank of this thread, 0 outside a world."""
    return getattr(_this_thread, "rank", 0)

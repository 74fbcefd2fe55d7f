"""The judge's side of ranks that a launcher has started: requests out over TCP, replies and losses in.

Ranks connect to the judge with a key that they got through their process group, so that what is unpickled here
comes from them. A failure can leave collectives half done on some ranks. Nobody here may restart them, so the judge
finds out whether they are still in step, and otherwise runs nothing more on them.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

from hyper_parallel.parity.launcher import Launch
from hyper_parallel.parity.pool import Interrupted, RankFailure, rank_names

# Others may be about to report the same mistake, or about to hang because of it.
_GRACE = 5.0
_STACK_SECONDS = 2.0
# A stranger that connects and says nothing takes one of these threads.
_ACCEPTING = 4
_ROLL_CALL = "hyper_parallel.parity.worker:roll_call"


@dataclass(slots=True)
class _Replies:
    """What one call came to; ``lost`` and ``signals`` in the order of their arrival."""

    results: dict[int, bytes] = field(default_factory=dict)
    tracebacks: dict[int, str] = field(default_factory=dict)
    lost: list[int] = field(default_factory=list)
    signals: dict[int, str] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    timed_out: bool = False
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return bool(self.tracebacks or self.lost or self.signals or self.silent)

    @property
    def all_idle(self) -> bool:
        """Whether every rank has answered and waits for the next call."""
        return not (self.lost or self.signals or self.silent)


class LaunchedRanks:
    """The ranks of one launch, with the interface of ``RankPool``. They connect on entering the ``with`` block.

    ``close`` is called after leaving it, as the ranks' exit status depends on the report.
    """

    def __init__(self, listener: Listener, launch: Launch, start_timeout: float) -> None:
        self._listener = listener
        self._launch = launch
        self._start_timeout = start_timeout
        self._ranks: dict[int, Connection] = {}
        self._ended: str | None = None
        self._calls = 0

    @property
    def ended(self) -> str | None:
        return self._ended

    def __enter__(self) -> LaunchedRanks:
        arrived: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        for _ in range(_ACCEPTING):
            threading.Thread(target=_accept, args=(self._listener, arrived), daemon=True).start()
        deadline = time.monotonic() + self._start_timeout
        while len(self._ranks) < self._launch.world_size:
            try:
                rank, connection = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(self._launch.world_size)) - self._ranks.keys())
                raise RankFailure(
                    f"ranks {missing} of {self._launch.world_size} did not connect to the judge beside rank 0 at "
                    f"{self._listener.address} within {self._start_timeout:g} s: did they start, and can their hosts "
                    "reach it?"
                ) from None
            self._ranks[rank] = connection
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the ranks waiting."""

    def close(self, status: int) -> None:
        """Let the ranks end with this exit status, wherever they are."""
        self._listener.close()
        for connection in self._ranks.values():
            with contextlib.suppress(OSError):
                connection.send(("close", status))
            connection.close()

    def run(self, target: str, *args: object, timeout: float, label: str = "") -> list[Any]:
        """Call ``target``, which is ``"package.module:function"``, on every rank; the results in rank order.

        Raises:
            RankFailure: a rank raised, died or hangs. If ``ended`` is then set, nothing more can run.
            Interrupted: ranks were told to end, and none of them has raised or died.
        """
        if self._ended is not None:
            raise RankFailure(self._ended)
        try:
            replies = self._call(target, args, timeout)
            if not replies.failed:
                return [pickle.loads(replies.results[rank]) for rank in sorted(self._ranks)]
        except BaseException:  # an interrupted call leaves replies behind
            self._ended = f"{label!r} was interrupted"
            raise
        if replies.signals and not (replies.tracebacks or replies.lost):
            told = "; ".join(self._signal_lines(replies))
            self._ended = f"interrupted in {label!r}: {told}"
            raise Interrupted(self._ended)
        if not (replies.all_idle and self._in_step(timeout)):
            self._ended = f"the ranks are gone or out of step since {label!r} failed, and a launcher's cannot be restarted"
        raise RankFailure("\n".join(self._lines(f"{label} ({target})", replies, timeout)))

    def _call(self, target: str, args: Sequence[object], timeout: float) -> _Replies:
        self._calls += 1
        for connection in self._ranks.values():
            with contextlib.suppress(OSError):  # a rank that is gone shows when its reply is read
                connection.send(("call", target, args))
        replies = self._collect(time.monotonic() + timeout)
        if replies.silent:
            self._ask_for_stacks(replies)
        return replies

    def _in_step(self, timeout: float) -> bool:
        args = (self._calls, self._launch.world_size)
        replies = self._call(_ROLL_CALL, args, timeout)
        return not replies.failed and all(pickle.loads(result) for result in replies.results.values())

    def _collect(self, deadline: float) -> _Replies:
        replies = _Replies()
        numbers = {connection: rank for rank, connection in self._ranks.items()}
        hurried = False
        while numbers:
            ready = wait(list(numbers), max(0.0, deadline - time.monotonic()))
            if not ready:
                replies.timed_out = not hurried
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                if _read(connection, numbers[connection], replies):
                    del numbers[connection]
            if replies.failed and not hurried:
                hurried = True
                deadline = min(deadline, time.monotonic() + _GRACE)
        replies.silent = tuple(sorted(numbers.values()))
        return replies

    def _ask_for_stacks(self, replies: _Replies) -> None:
        asked = {self._ranks[rank]: rank for rank in replies.silent}
        for silent in asked:
            with contextlib.suppress(OSError):
                silent.send(("stack",))
        deadline = time.monotonic() + _STACK_SECONDS
        while asked and (ready := wait(list(asked), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                with contextlib.suppress(EOFError, OSError):
                    kind, value = connection.recv()
                    if kind != "stack":
                        continue
                    replies.stacks[asked[connection]] = value
                del asked[connection]

    def _lines(self, what: str, replies: _Replies, seconds: float) -> list[str]:
        size, name = self._launch.world_size, self._launch.launcher
        lines = [
            f"{what} failed on {size} rank{'s' * (size > 1)} of {self._launch.platform}, started by {name}"
        ]
        if replies.lost:
            first, *others = replies.lost
            lines.append(f"rank {first} died: its connection was lost{' first' * bool(others)}")
            lines += [f"then those of {rank_names(others)}, which {name} may have ended"] if others else []
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted(replies.tracebacks.items()):
            by_text.setdefault(text, []).append(rank)
        for text, members in by_text.items():
            lines += [f"{rank_names(members)} raised:", text.rstrip()]
        lines += self._signal_lines(replies)
        if replies.timed_out:
            lines.append(f"timed out after {seconds:g} s; silent ranks: {list(replies.silent)}")
        elif replies.silent:
            lines.append(f"no answer from ranks {list(replies.silent)}, which may wait for others")
        if replies.results:
            lines.append(f"ranks that finished: {sorted(replies.results)}")
        for rank, stack in sorted(replies.stacks.items()):
            lines += [f"-- rank {rank} was here:", stack.rstrip()]
        return lines

    def _signal_lines(self, replies: _Replies) -> Iterator[str]:
        for name in dict.fromkeys(replies.signals.values()):
            told = [rank for rank, each in sorted(replies.signals.items()) if each == name]
            yield f"{self._launch.launcher} told {rank_names(told)} to end ({name})"


def _read(connection: Connection, rank: int, replies: _Replies) -> bool:
    """Read one message of a rank; true if nothing more will come for this call."""
    try:
        kind, value = connection.recv()
    except (EOFError, OSError):
        replies.lost.append(rank)
        return True
    if kind == "result":
        replies.results[rank] = value
    elif kind == "error":
        replies.tracebacks[rank] = value
    elif kind == "signal":
        replies.signals[rank] = value
    return kind in ("result", "error")


def _accept(listener: Listener, arrived: queue.SimpleQueue[tuple[int, Connection]]) -> None:
    while True:
        try:
            connection = listener.accept()
            assert isinstance(connection, Connection)
            arrived.put((connection.recv(), connection))
        except (
            AuthenticationError,
            EOFError,
            ConnectionError,
        ):  # a stranger, or a rank that only tried the address
            continue
        except OSError:  # closed
            return

"""A pool of ranks on this machine: real processes and real collectives, started once and called many times.

    with RankPool("torch", 2) as pool:
        losses = pool.run("my_checks:train_step", 0.1)   # one result per rank, in rank order

Starting ranks takes seconds and a call takes milliseconds, so a suite keeps one pool per platform and world
size. After a failure the processes are thrown away, since nobody knows where the surviving ranks wait, and the
next call starts new ones. Needs a POSIX system; ranks die with their parent, however it dies.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from hyper_parallel.parity.rank_processes import (
    SCHEDULER,
    SERVER,
    Outcome,
    RankProcesses,
    ServerOptions,
    log_file,
)

_LOG_LINES = 20


class RankFailure(RuntimeError):  # noqa: N818  it reports what ranks did, often not an error of the caller
    """A call did not give one result per rank.

    The message names the call and the ranks to blame, with their tracebacks, exit statuses or the time-out, and
    the end of their logs.
    """


class Interrupted(RankFailure):
    """A call ended because somebody told the ranks to end, not because of what they did."""


class RankPool:
    """Ranks of one platform that call functions together. Not thread-safe.

    The processes start on entering the ``with`` block, or else with the first call. Standard output and error of
    each rank go to ``rank<N>.log`` in ``log_dir``. The default is a temporary directory, which ``close`` removes
    unless a call has failed. ``threads`` is the number of compute threads of one rank.

    Raises:
        ValueError: ``world_size`` or ``threads`` is less than 1.
    """

    def __init__(
        self,
        platform: str,
        world_size: int,
        *,
        start_timeout: float = 180.0,
        log_dir: str | None = None,
        threads: int = 1,
    ) -> None:
        if world_size < 1 or threads < 1:
            raise ValueError(f"RankPool: world_size={world_size} and threads={threads} must be at least 1")
        self.platform = platform
        self.world_size = world_size
        self._start_timeout = start_timeout
        self._threads = threads
        self._temporary = log_dir is None
        self._log_dir = Path(log_dir or tempfile.mkdtemp(prefix=f"hyper_parallel_{platform}_"))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._log_starts: dict[int, int] = {}
        self._processes: RankProcesses | None = None
        self._failed = False
        self._closed = False

    @property
    def ended(self) -> None:
        """None: a pool starts new processes after a failure, so that it can always run more."""

    @property
    def broken(self) -> bool:
        """Whether the last call failed, so that the next one starts new processes."""
        return self._failed and self._processes is None

    def run(self, target: str, *args: object, timeout: float = 60.0, label: str = "") -> list[Any]:
        """Call ``target``, which is ``"package.module:function"``, on every rank; the results in rank order.

        Arguments and results are pickled, so they cannot be of classes that are defined in ``__main__``. Modules
        are looked up on this process's ``sys.path`` as it was when the ranks started. ``timeout`` is in seconds and
        does not include the start; ``label`` names the call in a failure.

        Raises:
            RankFailure: a rank raised, died or did not answer in time, or the ranks could not start. As soon as
                one rank has failed, the others get a few seconds to report, too.
            ValueError: ``target`` has another form.
            RuntimeError: the pool is closed.
        """
        if not all(target.partition(":")):
            raise ValueError(f"RankPool.run: target must be 'package.module:function', got {target!r}")
        request = pickle.dumps((target, args))
        processes = self._started()
        what = f"{label} ({target})" if label else target
        self._mark_logs()
        try:
            outcome = processes.call(request, timeout)
            if outcome.failed:
                self._fail(what, outcome, timeout)
        except (
            BaseException
        ):  # an interrupted call leaves replies behind that the next one would take for its own
            self._kill()
            raise
        return [self._load(what, rank, outcome.results[rank]) for rank in range(self.world_size)]

    def close(self) -> None:
        """Let the ranks leave their group and end them; a second call does nothing."""
        self._closed = True
        if self._processes is not None:
            self._processes.close()
            self._processes = None
        if self._temporary and not self._failed:
            shutil.rmtree(self._log_dir, ignore_errors=True)

    def __enter__(self) -> RankPool:
        self._started()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> RankProcesses:
        if self._closed:
            raise RuntimeError(f"RankPool: this pool of {self.platform} ranks is closed")
        if self._processes is not None:
            return self._processes
        self._mark_logs()
        options = ServerOptions(
            platform=self.platform,
            world_size=self.world_size,
            start_timeout=self._start_timeout,
            threads=self._threads,
            log_dir=str(self._log_dir.resolve()),
            sys_path=tuple(os.path.abspath(entry) for entry in sys.path),
        )
        self._processes = RankProcesses(options)
        try:
            outcome = self._processes.join(self._start_timeout)
            if outcome.failed:
                self._fail("the start", outcome, self._start_timeout)
        except BaseException:
            self._kill()
            raise
        return self._processes

    def _kill(self) -> None:
        self._failed = True
        if self._processes is not None:
            self._processes.kill()
            self._processes = None

    def _load(self, what: str, rank: int, payload: bytes) -> Any:
        try:
            return pickle.loads(payload)
        except Exception as error:
            raise RankFailure(
                f"{what} on {self.platform}: cannot unpickle the result of rank {rank}: {error!r}"
            ) from error

    def _fail(self, what: str, outcome: Outcome, seconds: float) -> None:
        if outcome.timed_out and self._processes is not None:
            self._processes.dump_stacks(outcome.silent)
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        lines = [f"{what} failed on {ranks} of {self.platform}; logs: {self._log_dir}"]
        lines += _describe(outcome, seconds)
        guilty = {*outcome.tracebacks, *outcome.exits, *(outcome.silent if outcome.timed_out else ())}
        for member in sorted(guilty):
            lines += self._log_tail(member)
        raise RankFailure("\n".join(lines))

    def _mark_logs(self) -> None:
        members = range(SERVER, self.world_size)
        paths = {member: log_file(self._log_dir, member) for member in members}
        self._log_starts = {m: path.stat().st_size if path.exists() else 0 for m, path in paths.items()}

    def _log_tail(self, member: int) -> list[str]:
        path = log_file(self._log_dir, member)
        if not path.exists():
            return []
        with path.open("rb") as log:
            log.seek(max(self._log_starts[member], path.stat().st_size - (1 << 16)))
            lines = log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
        return [f"-- end of {path.name}:", *(f"   {line}" for line in lines)] if lines else []


def _describe(outcome: Outcome, seconds: float) -> list[str]:
    lines = []
    by_text: dict[str, list[int]] = {}
    for member, text in sorted(outcome.tracebacks.items()):
        by_text.setdefault(text, []).append(member)
    for text, members in by_text.items():
        lines += [f"{rank_names(members)} raised:", text.rstrip()]
    lines += [f"{rank_names([member])} {_ending(code)}" for member, code in sorted(outcome.exits.items())]
    silent = list(outcome.silent)
    if outcome.timed_out:
        lines.append(f"timed out after {seconds:g} s; silent ranks: {silent}")
    elif silent:
        lines.append(f"no answer from ranks {silent}, which may have waited for the failed ones")
    if outcome.results:
        lines.append(f"ranks that finished: {sorted(outcome.results)}")
    return lines


def rank_names(members: Iterable[int]) -> str:
    """``rank 0, rank 2``."""
    names = [{SCHEDULER: "the scheduler", SERVER: "the rank server"}.get(m, f"rank {m}") for m in members]
    return ", ".join(names)


def _ending(code: int | None) -> str:
    if code is None:
        return "died (status unknown)"
    if code < 0:
        return f"died (signal {-code}: {signal.strsignal(-code)})"
    return f"ended with exit status {code}"

"""The process that judges a launcher's ranks and writes the report; rank 0 starts it, and it outlives rank 0.

A rank that dies makes launchers kill the others, some with SIGKILL, and a hanging collective may never give the
interpreter back. So what is known of the cases is kept in a process that computes nothing with a framework, in a
session of its own. It is there before the ranks join, so that it can also report that they did not.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from hyper_parallel.parity.cases import selected_cases
from hyper_parallel.parity.launched_ranks import LaunchedRanks
from hyper_parallel.parity.launcher import Launch
from hyper_parallel.parity.suite import Settings
from hyper_parallel.parity.terminal import run_and_show, show_unrun

_START_SECONDS = 60.0


class Judge:
    """Rank 0's side of the judge."""

    def __init__(self, launch: Launch, settings: Settings, select: tuple[str, ...]) -> None:
        self._control, theirs = Pipe()
        package_root = str(Path(__file__).resolve().parents[2])
        search = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hyper_parallel.parity.judge", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._control.send((launch, settings, select))

    def listen(self, host: str, key: bytes) -> int:
        """Have it wait for the ranks; the port. ``host`` is where it listens, "" for every interface.

        Raises:
            EOFError: it has ended; its standard error, which is ours, says why.
        """
        self._control.send((host, key))
        port = self._control.recv()
        assert isinstance(port, int)
        return port

    def give_up(self, reason: str) -> None:
        """Have it report that no case could run."""
        with contextlib.suppress(OSError):
            self._control.send(reason)

    def wait(self, seconds: float) -> int:
        """Wait for the report; the exit status, 1 if it takes longer."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return 1


def main(descriptor: int) -> int:
    """Judge until the last case, write the report, and send the ranks home."""
    control = Connection(descriptor)
    launch, settings, select = control.recv()
    size = launch.world_size
    cases = selected_cases((size,), select)
    try:
        told = control.recv()
    except (EOFError, OSError):
        told = "rank 0 ended before; another rank's output may say why"
    if isinstance(told, str):
        return show_unrun(settings, cases, told)
    host, key = told
    listener = Listener((host, 0), "AF_INET", backlog=max(size, 16), authkey=key)
    ranks = LaunchedRanks(listener, launch, _START_SECONDS)
    control.send(listener.address[1])
    status = 1
    try:
        status = run_and_show(settings, cases, lambda platform, world_size: ranks)
    finally:
        ranks.close(status)
    return status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

"""The process that judges a launcher's ranks and writes the report; rank 0 starts it, and it outlives rank 0.

A rank that dies makes launchers kill the others, some with SIGKILL, and a hanging collective may never give the
interpreter back. So what is known of the cases is kept in a process that computes nothing with a framework, in a
session of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from hyper_parallel.parity.cases import selected_cases
from hyper_parallel.parity.launched_ranks import LaunchedRanks
from hyper_parallel.parity.launcher import Launch
from hyper_parallel.parity.suite import Settings
from hyper_parallel.parity.terminal import run_and_show

_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """What the judge is told by rank 0. ``host`` is where it listens, "" for every interface."""

    launch: Launch
    settings: Settings
    select: tuple[str, ...]
    key: bytes
    host: str


def start_judge(options: JudgeOptions) -> tuple[subprocess.Popen[bytes], int]:
    """Start the judge as a process of its own; the process, and the port at which it listens.

    Raises:
        EOFError: it ended at once; its standard error, which is ours, says why.
    """
    ours, theirs = Pipe()
    package_root = str(Path(__file__).resolve().parents[2])
    search = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "hyper_parallel.parity.judge", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(search)},
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    ours.send(options)
    port = ours.recv()
    assert isinstance(port, int)
    return process, port


def main(descriptor: int) -> int:
    """Judge until the last case, write the report, and send the ranks home."""
    control = Connection(descriptor)
    options: JudgeOptions = control.recv()
    size = options.launch.world_size
    listener = Listener((options.host, 0), "AF_INET", backlog=max(size, 16), authkey=options.key)
    ranks = LaunchedRanks(listener, options.launch, _START_SECONDS)
    control.send(listener.address[1])
    status = 1
    try:
        cases = selected_cases((size,), options.select)
        status = run_and_show(options.settings, cases, lambda platform, world_size: ranks)
    finally:
        ranks.close(status)
    return status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

"""Starts the parity command with torchrun and msrun, and reads what it reports."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
COMMAND = ("-m", "hyper_parallel.parity")
FAILING = str(Path(__file__).with_name("failing_ranks.py"))
SECONDS = 150


def environment(**variables: str) -> dict[str, str]:
    """Launchers look for their programs in PATH; the ranks of an outer launch must not be taken for ours."""
    found = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/")}
    quick = {"MS_RETRY_INTERVAL_LOWER": "1", "MS_RETRY_INTERVAL_UPPER": "1", "MS_NODE_TIMEOUT": "5"}
    return {**found, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **quick, **variables}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def launch(command: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in ``folder``; its standard error is part of its output."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def torchrun(
    folder: Path, ranks: int, *arguments: str, program: Sequence[str] = COMMAND, **variables: str
) -> subprocess.CompletedProcess[str]:
    launcher = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    return launch([*launcher, *program, *arguments], folder, **variables)


def msrun(
    folder: Path, ranks: int, *arguments: str, program: Sequence[str] = ("python", *COMMAND)
) -> subprocess.CompletedProcess[str]:
    launcher = [str(BIN / "msrun"), "--worker_num", str(ranks), "--local_worker_num", str(ranks)]
    launcher += ["--master_port", str(free_port()), "--join", "True", "--log_dir", str(folder / "logs")]
    return launch([*launcher, *program, *arguments], folder)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS / 2
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running_in(folder: Path) -> list[str]:
    """The processes whose working directory it is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text())
    return found


def report(folder: Path) -> Any:
    """What it says, once its last file is there: the judge may still be writing when the launcher has ended."""
    wait_until((folder / "parity.html").exists)
    return json.loads((folder / "parity.json").read_text())


def verdicts(document: Any, platform: str) -> dict[str, str]:
    """By parallelism."""
    return {case["parallelism"]: case["platforms"][platform]["verdict"] for case in document["cases"]}


def failure(document: Any, platform: str, parallelism: str) -> str:
    """The texts of the failed case."""
    (found,) = [case for case in document["cases"] if case["parallelism"] == parallelism]
    return "\n".join(found["platforms"][platform]["failures"])

"""The first examples of the README, as a reader would run them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.named_backends import BACKENDS

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
WORLD_SIZE = 2


def example(framework: str) -> str:
    """The code block that imports the framework, and those after it that import the framework's adapter."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    first, *more = [
        block
        for block in blocks
        if re.search(
            rf"^(import {framework}( as \w+)?$|from hyper_parallel_{framework})", block, re.MULTILINE
        )
    ]
    return "\n".join([first, *more])


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def run(command: list[str], folder: Path) -> str:
    path = os.pathsep.join([str(SCRIPTS), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    logs = "".join(log.read_text() for log in sorted(folder.glob("logs/*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return done.stdout + logs


def norms(output: str) -> set[tuple[int, str, str]]:
    """(rank, which norm, norm) of what the ranks print; logs may repeat it."""
    found = re.findall(r"rank (\d): (norm [a-z ]+) (\d+\.\d{4})", output)
    return {(int(rank), which, norm) for rank, which, norm in found}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", BACKENDS)
def test_first_example_runs_on_two_ranks(framework: str, tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(example(framework))
    launchers = {
        "torch": ["torchrun", "--nproc-per-node", "2", "--master-port", free_port()],
        "mindspore": [
            "msrun",
            "--worker_num",
            "2",
            "--local_worker_num",
            "2",
            "--join",
            "True",
            "--log_dir",
            "logs",
            "--master_port",
            free_port(),
        ],
    }
    command = [str(SCRIPTS / launchers[framework][0]), *launchers[framework][1:], str(script)]
    found = norms(run(command, tmp_path))
    assert len(found) == WORLD_SIZE * example(framework).count(": norm ")
    assert {rank for rank, _, _ in found} == set(range(WORLD_SIZE))
    assert len({norm for _, _, norm in found}) == 1

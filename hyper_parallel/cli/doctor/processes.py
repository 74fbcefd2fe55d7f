"""The parent's side: start processes that each answer one question, and end them, whatever they do.

Processes are started anew and not forked, as an accelerator's runtime may not survive a fork, and in a session of
their own, so that one signal ends them with everything they started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What places a process in a job of the user's; the processes here form groups of their own.
_JOB_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK",
    "RANK_ID", "RANK_SIZE", "DEVICE_ID", "RANK_TABLE_FILE",
    "MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_TOPO_TIMEOUT",
)  # fmt: skip
# Peers of a failed process get so long to say what they saw, and all of them to leave by themselves.
_GRACE = 5.0
_FAREWELL = 3.0
_POLL = 0.02


@dataclass(frozen=True, slots=True)
class Question:
    """``task`` of ``child``, with its arguments. The answer of a ``helper`` is not waited for."""

    platform: str
    task: str
    arguments: Mapping[str, Any]
    helper: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process had found when it was done, had failed or was ended; ``error`` is None in the first case."""

    values: Mapping[str, Any]
    error: str | None


def ask(questions: Sequence[Question], timeout: float) -> list[Answer]:
    """Start one process per question, all at once; the answers in the order of the questions that are no helpers'.

    Never raises for what a process does, and leaves none behind.
    """
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_doctor_") as folder:
        children: list[_Child] = []
        try:
            for number, question in enumerate(questions):
                children.append(_Child(question, Path(folder) / str(number)))
            asked = [child for child in children if not child.is_helper]
            _wait(asked, timeout)
            return [child.answer(timeout) for child in asked]
        finally:
            _end(children)


def _wait(children: Sequence[_Child], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    hurried = False
    while time.monotonic() < deadline and not all(child.ready for child in children):
        if not hurried and any(child.ready and child.answer(timeout).error for child in children):
            hurried, deadline = True, min(deadline, time.monotonic() + _GRACE)
        time.sleep(_POLL)


def _end(children: Sequence[_Child]) -> None:
    for child in children:
        child.dismiss()
    deadline = time.monotonic() + _FAREWELL
    for child in children:
        child.end(deadline)


class _Child:
    def __init__(self, question: Question, stem: Path) -> None:
        self.is_helper = question.helper
        self._file, self._log = stem.with_suffix(".json"), stem.with_suffix(".log")
        request = {
            "platform": question.platform,
            "task": question.task,
            "arguments": dict(question.arguments),
            "answer": str(self._file),
        }
        # Modules are looked up as here: not in the working directory, which `-c` would add.
        code = f"import sys; sys.path[:] = {sys.path!r}; from hyper_parallel.cli.doctor.child import main; main()"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(request)],
                stdin=subprocess.PIPE, stdout=log, stderr=log, env=_environment(question.platform),
                start_new_session=True,
            )  # fmt: skip

    @property
    def ready(self) -> bool:
        """Whether nothing more will come."""
        ended = self._process.poll() is not None  # first: what it wrote before it ended is there then
        return ended or not {"done", "error"}.isdisjoint(self._values())

    def answer(self, timeout: float) -> Answer:
        values = self._values()
        if values.pop("done", False):
            return Answer(values, None)
        error = values.pop("error", None)
        return Answer(values, error if error is not None else self._ending(timeout))

    def dismiss(self) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def end(self, deadline: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):  # also for what it may have started and left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _values(self) -> dict[str, Any]:
        try:
            values: dict[str, Any] = json.loads(self._file.read_text())
        except FileNotFoundError:
            return {}
        return values

    def _ending(self, timeout: float) -> str:
        code = self._process.poll()
        last = next((line for line in reversed(self._log_lines()) if line), None)
        words = f"; its last words: {last}" if last else ""
        if code is None:
            return f"no answer within {timeout:g} s{words}"
        if code < 0:
            return f"the process was ended by signal {-code} ({signal.strsignal(-code)}){words}"
        return f"the process ended with status {code} and no answer{words}"

    def _log_lines(self) -> list[str]:
        return [line.strip() for line in self._log.read_text(errors="replace").splitlines()]


def _environment(platform: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _JOB_VARIABLES}
    return kept | {"HYPER_PARALLEL_PLATFORM": platform}

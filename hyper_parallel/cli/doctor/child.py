"""The child's side: one question to a framework, in a process that may be killed by it or hang in it.

A process imports the packages of one platform and describes them (``describe``), or is one rank of a small group that
calls an all-reduce and ``clip_grad_norm_`` (``exercise``). What it has found so far stands in a file at any time, so
that a crash takes nothing along. The end of standard input tells it to leave, also if the parent is gone: ranks stay
until all have answered, since one that leaves early can hang the others.

A framework is reached through the entry-point group ``hyper_parallel.diagnostics`` alone (see ``Diagnostics``).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, cast

GROUP = "hyper_parallel.diagnostics"
SCHEDULER = -1
_LONGEST = 600


class Diagnostics(Protocol):
    """What an entry point of ``hyper_parallel.diagnostics`` names: a module, which imports its framework late."""

    packages: tuple[str, ...]
    """The package of the framework, then packages that extend it and are used where they are installed."""
    has_scheduler: bool
    """Whether one more process, which computes nothing, has to bring ranks together."""

    def prepare(self) -> None:
        """Set what the framework reads while it is imported."""

    def describe(self, imported: Sequence[str]) -> Mapping[str, Any]:
        """``devices``: a list of {type, backend, names}; optionally ``no_npu`` and ``cann_versions``.

        ``imported`` are the packages that could be imported, the framework among them.
        """

    def join(self, device: str, rank: int, world_size: int, port: int, folder: str, timeout: float) -> None:
        """Join a group of ranks on this machine, of which each has one device of the type; rank -1 is the scheduler.

        ``port`` is free on 127.0.0.1, and the ranks share the empty ``folder``.
        """

    def all_reduce(self, device: str, number: float) -> float:
        """The sum of the ranks' numbers, by one collective of the framework on tensors on the device."""


def find_diagnostics() -> dict[str, Any]:
    """The entry points, by the name of the platform."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def main() -> None:
    """Answer the question in the first argument; does not return before standard input ends."""
    request = json.loads(sys.argv[1])
    waiting = threading.Thread(target=_wait_for_end, daemon=True)
    waiting.start()
    answer = _Answer(Path(request["answer"]))
    try:
        diagnostics = cast(Diagnostics, find_diagnostics()[request["platform"]].load())
        tasks: dict[str, Callable[..., None]] = {"describe": _describe, "exercise": _exercise}
        tasks[request["task"]](diagnostics, answer, **request["arguments"])
        answer.add(done=True)
    except BaseException as error:  # noqa: BLE001  SystemExit too: the parent reports it
        traceback.print_exc()
        answer.add(error=error_line(error))
    sys.stdout.flush()
    sys.stderr.flush()
    waiting.join()


class _Answer:
    """What was found so far, in a file that is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def add(self, **values: Any) -> None:
        self._values.update(values)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._values))
        partial.replace(self._path)


def _wait_for_end() -> None:
    sys.stdin.buffer.read()
    # Not by way of the exit handlers: those of MindSpore can wait for ranks that are gone.
    os._exit(0)


def _describe(diagnostics: Diagnostics, answer: _Answer) -> None:
    diagnostics.prepare()
    answer.add(has_scheduler=diagnostics.has_scheduler)
    imports: dict[str, str | None] = {}
    for name in diagnostics.packages:
        if importlib.util.find_spec(name) is None:
            continue
        imports[name] = _import_error(name)
        answer.add(imports=imports)
        if imports[name] is not None and name == diagnostics.packages[0]:
            return
    answer.add(**diagnostics.describe([name for name, error in imports.items() if error is None]))


def _import_error(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001  some versions of torch_npu call sys.exit() without CANN
        traceback.print_exc()
        return error_line(error)
    return None


def _exercise(
    diagnostics: Diagnostics,
    answer: _Answer,
    *,
    device: str,
    rank: int,
    world_size: int,
    number: float,
    gradient: list[float],
    **meeting: Any,
) -> None:
    diagnostics.prepare()
    diagnostics.join(device, rank, world_size, **meeting)
    if rank == SCHEDULER:
        return
    answer.add(all_reduce=[diagnostics.all_reduce(device, number)])
    answer.add(clip_grad_norm_=_clip(device, world_size, gradient))


def _clip(device: str, world_size: int, gradient: list[float]) -> list[float]:
    """The norm of the ranks' gradients taken as shards of one, and this rank's elements after clipping to 1."""
    import hyper_parallel

    platform = hyper_parallel.get_platform()
    mesh = hyper_parallel.init_device_mesh(device, (world_size,), mesh_dim_names=("ranks",))
    local = platform.from_numpy(gradient, "float32", device)
    parameter = platform.parameter(platform.from_numpy([0.0] * len(gradient), "float32", device))
    hyper_parallel.attach_layout(parameter, mesh, [hyper_parallel.Shard(0)])
    norm = hyper_parallel.clip_grad_norm_([parameter], 1.0, grads=[local])
    return [float(norm), *(float(value) for value in local)]


def error_line(error: BaseException) -> str:
    """The error in one line, with the one that is at the root of it."""
    first, root = error, error
    while (before := root.__cause__ or (None if root.__suppress_context__ else root.__context__)) is not None:
        root = before
    if isinstance(first, SystemExit):
        first = root
    return _line(first) if first is root else f"{_line(first)} (after {_line(root)})"


def _line(error: BaseException) -> str:
    """The first and the last line, since either may be the one that tells, without the stacks of C++."""
    lines = []
    for line in map(str.strip, str(error).splitlines()):
        if line.startswith(("Exception raised from", "----")):
            break
        if line:
            lines.append(line)
    text = " ... ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else ""
    return f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__

"""The child's side of a pool: import the framework once, fork the ranks, report the ones that end.

Started by ``rank_processes`` as ``python -m hyper_parallel.parity.rank_server CONTROL RANK0 RANK1 ...``, the
numbers being inherited sockets. An import costs seconds and a fork milliseconds, so the server imports and never
runs an operation: the threads and locks that one would leave behind do not survive a fork.

A framework is reached through the entry-point group ``hyper_parallel.local_ranks`` alone (see ``LocalRanks``).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from hyper_parallel.parity.local_ranks import LocalRanks, call, find_local_ranks
from hyper_parallel.parity.rank_processes import (
    CLOSE,
    SCHEDULER,
    SERVER,
    ServerOptions,
    log_file,
    receive_frame,
    send_frame,
)

_PR_SET_PDEATHSIG = 1


class _Children:
    """The forked processes; the lock keeps the watcher from missing one that is being forked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[int, int] = {}
        self._killed = False

    def fork(self, member: int) -> bool:
        """Fork; true in the child."""
        with self._lock:
            if self._killed:
                return False
            pid = os.fork()
            if pid:
                self._members[pid] = member
            return pid == 0

    def pids(self) -> dict[int, int]:
        return {member: pid for pid, member in self._members.items()}

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            for pid in self._members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def wait(self) -> tuple[int, int]:
        """Reap one child: who it was, and its exit code. Raises ChildProcessError when none is left."""
        while True:
            pid, status = os.wait()
            with self._lock:
                if pid in self._members:
                    return self._members.pop(pid), os.waitstatus_to_exitcode(status)

    def only_scheduler_left(self) -> bool:
        return set(self._members.values()) == {SCHEDULER}


def _watch_parent(control: socket.socket, children: _Children) -> None:
    # The parent says nothing after the options, so this returns when it closed the socket or died.
    with contextlib.suppress(OSError):
        control.recv(1)
    children.kill()
    if not children.pids():  # otherwise the main thread reaps them and ends
        os._exit(0)


def main(descriptors: list[int]) -> None:
    """Serve until every rank has ended or the parent is gone."""
    control, *ranks = (socket.socket(fileno=descriptor) for descriptor in descriptors)
    options: ServerOptions = pickle.loads(receive_frame(control))
    children = _Children()
    threading.Thread(target=_watch_parent, args=(control, children), daemon=True).start()
    sys.path[:] = options.sys_path
    try:
        local = find_local_ranks(options.platform)
        local.prepare()
    except BaseException:  # noqa: BLE001  the parent raises it
        send_frame(control, pickle.dumps(("error", SERVER, traceback.format_exc())))
        sys.exit(1)
    reservation = _reserve_port()
    port = reservation.getsockname()[1]
    server = os.getpid()
    for member in range(SCHEDULER if local.has_scheduler else 0, options.world_size):
        if children.fork(member):
            _keep_only(control, ranks, member)
            _become(member, options, server)
            _live(local, None if member == SCHEDULER else ranks[member], member, port, options)
    for sock in ranks:
        sock.close()
    _report_exits(control, children)


def _reserve_port() -> socket.socket:
    # Bound and never listening: nobody else is given the port, yet whoever also sets SO_REUSEADDR, as the
    # frameworks' stores do, can bind it. Closing it instead would let another process take it meanwhile.
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def _report_exits(control: socket.socket, children: _Children) -> None:
    with contextlib.suppress(OSError):  # the parent may be gone; reaping goes on all the same
        for member, pid in children.pids().items():
            send_frame(control, pickle.dumps(("pid", member, pid)))
    with contextlib.suppress(ChildProcessError):
        while True:
            member, code = children.wait()
            with contextlib.suppress(OSError):
                send_frame(control, pickle.dumps(("exit", member, code)))
            if children.only_scheduler_left():
                children.kill()


def _keep_only(control: socket.socket, ranks: list[socket.socket], member: int) -> None:
    # A copy of a rank's socket in a sibling would hide that rank's death from the parent.
    control.close()
    for rank, sock in enumerate(ranks):
        if rank != member:
            sock.close()


def _become(member: int, options: ServerOptions, server: int) -> None:
    with contextlib.suppress(AttributeError):  # Linux only; elsewhere the end of the rank's socket has to do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it died before the line above
        os._exit(1)
    log = os.open(log_file(Path(options.log_dir), member), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)


def _live(
    local: LocalRanks, sock: socket.socket | None, rank: int, port: int, options: ServerOptions
) -> NoReturn:
    """The whole life of a forked process: never returns into the server's code."""
    code = 1
    try:
        local.join(rank, options.world_size, port, options.start_timeout)
        if sock is None:
            signal.pause()
        else:
            send_frame(sock, pickle.dumps(("result", b"")))
            _serve(sock)
            local.leave()
            code = 0
    except BaseException:  # noqa: BLE001  the parent raises it
        traceback.print_exc()
        if sock is not None:
            with contextlib.suppress(OSError):
                send_frame(sock, pickle.dumps(("error", traceback.format_exc())))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Neither the server's exit handlers nor a framework's: those of MindSpore can wait for dead peers.
        os._exit(code)


def _serve(sock: socket.socket) -> None:
    """Answer requests until the parent asks to close, or is gone."""
    with contextlib.suppress(EOFError):
        while (request := receive_frame(sock)) != CLOSE:
            send_frame(sock, pickle.dumps(_answer(request)))


def _answer(request: bytes) -> tuple[str, bytes | str]:
    try:
        target, args = pickle.loads(request)
        return "result", pickle.dumps(call(target, args))
    except BaseException:  # noqa: BLE001  SystemExit too: a rank ends when the parent says so
        return "error", traceback.format_exc()


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])

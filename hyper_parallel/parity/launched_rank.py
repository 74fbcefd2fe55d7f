"""What a launcher's rank does: join the group, meet the judge, and answer its calls until it says to end.

The main thread runs the calls. A second one reads the socket, so that a rank that hangs in a collective can still
say where it hangs, and ends when the judge says so.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import queue
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, wait
from typing import Any

from hyper_parallel.interface import Platform
from hyper_parallel.parity.judge import Judge
from hyper_parallel.parity.launcher import Launch
from hyper_parallel.parity.local_ranks import DeviceMissing, LaunchedRanks, call
from hyper_parallel.parity.suite import Settings
from hyper_parallel.platforms import ENVIRONMENT_VARIABLE, get_platform

_CONNECT_SECONDS = 10.0
_JUDGE_SECONDS = 30.0
# Where no rank can start, rank 0 is to end first, with the report: launchers kill it as soon as another has ended.
_HEAD_START = 5.0
# Longer than a case may take, so that ranks that wait for a dead one are found waiting.
_JOIN_SECONDS = 600.0


def run_launched(local: LaunchedRanks, launch: Launch, settings: Settings, select: tuple[str, ...]) -> int:
    """Take part as one rank, or as the scheduler; returns the exit status, 1 on every rank if a case failed."""
    os.environ[ENVIRONMENT_VARIABLE] = launch.platform
    judge = Judge(launch, settings, select) if launch.rank == 0 and not launch.scheduler else None
    try:
        local.join_launched(settings.device_type, max(_JOIN_SECONDS, 2 * settings.timeout))
        if launch.scheduler:
            return 0
        if judge is None and get_platform().rank() == 0:
            judge = Judge(launch, settings, select)
        connection = _meet(judge, get_platform(), launch.world_size)
    except Exception as error:
        plain = f"{error}; hyper-parallel doctor says more" if isinstance(error, DeviceMissing) else None
        if judge is not None:
            judge.give_up(plain or traceback.format_exc())
            judge.wait(_JUDGE_SECONDS)
        if plain is None:
            raise
        print(f"parity: {plain}", file=sys.stderr, flush=True)
        if judge is None:
            time.sleep(_HEAD_START)
        return 1
    status = _Session(connection, settings.timeout).serve()
    local.leave()
    return status if judge is None else judge.wait(_JUDGE_SECONDS) or status


def _meet(judge: Judge | None, platform: Platform, world_size: int) -> Connection:
    """Connect to the judge; rank 0, which has it, tells all where it is."""
    rank, ranks = platform.rank(), tuple(range(world_size))
    one_host = len(set(platform.all_gather_object(socket.gethostname(), ranks))) == 1
    offer = None
    if judge is not None:
        key = secrets.token_bytes(32)
        hosts = ["127.0.0.1"] if one_host else _own_addresses()
        offer = (hosts, judge.listen(hosts[0] if one_host else "", key), key)
    hosts, port, key = platform.all_gather_object(offer, ranks)[0]
    connection = _connect(hosts, port, key)
    connection.send(rank)
    return connection


def _own_addresses() -> list[str]:
    """Where other hosts may reach this one: where the launcher's own meeting point is, then by name."""
    named = [
        os.environ.get("MASTER_ADDR"),
        os.environ.get("MS_SCHED_HOST"),
        socket.getfqdn(),
        socket.gethostname(),
    ]
    return list(dict.fromkeys(name for name in named if name))


def _connect(hosts: Sequence[str], port: int, key: bytes) -> Connection:
    """The first of ``hosts`` at which a judge knows the key.

    Raises:
        ConnectionError: none is.
    """
    errors = []
    for host in hosts:
        try:
            # Client has no time-out: first see whether anybody is there.
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
            connection = Client((host, port), "AF_INET", authkey=key)
        except (OSError, EOFError, AuthenticationError) as error:
            errors.append(f"{host}: {error}")
        else:
            assert isinstance(connection, Connection)
            return connection
    raise ConnectionError(
        f"{socket.gethostname()} cannot reach the judge beside rank 0 on port {port}: {'; '.join(errors)}"
    )


class _Session:
    """One rank's conversation with the judge."""

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._sending = threading.Lock()
        self._busy = False
        self._requests: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._signals, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        # A handler in Python would wait for a collective to return; this writes to the socket at once.
        signal.set_wakeup_fd(wakeup.detach())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: None)

    def serve(self) -> int:
        """Answer until the judge says to end, or is gone; returns the exit status it gave."""
        threading.Thread(target=self._read, daemon=True).start()
        while (request := self._requests.get())[0] == "call":
            # The last resort if neither thread can run, as in a collective that keeps the interpreter locked.
            faulthandler.dump_traceback_later(2 * self._timeout + 60, exit=True)
            self._send(*_answer(*request[1:]))
            faulthandler.cancel_dump_traceback_later()
        return int(request[1])

    def _send(self, kind: str, value: object) -> None:
        with self._sending, contextlib.suppress(OSError):  # the reader finds out that the judge is gone
            self._busy = self._busy and kind not in ("result", "error")
            self._connection.send((kind, value))

    def _read(self) -> None:
        while True:
            for ready in wait([self._connection, self._signals]):
                if ready is self._signals:
                    self._send("signal", signal.Signals(self._signals.recv(1)[0]).name)
                    continue
                try:
                    request = self._connection.recv()
                except (EOFError, OSError):
                    request = ("close", 1)
                if request[0] == "stack":
                    self._send("stack", _main_stack())
                elif request[0] == "close" and self._busy:
                    print(f"ended by the judge, while here:\n{_main_stack()}", file=sys.stderr, flush=True)
                    os._exit(int(request[1]) or 1)
                else:
                    self._busy = request[0] == "call"
                    self._requests.put(request)
                    if request[0] == "close":
                        return


def _answer(target: str, args: Sequence[object]) -> tuple[str, bytes | str]:
    try:
        return "result", pickle.dumps(call(target, args))
    except BaseException:  # noqa: BLE001  the judge reports it, SystemExit too
        return "error", traceback.format_exc()


def _main_stack() -> str:
    """Where the main thread is, from the function called on."""
    stack = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    callers = [index for index, frame in enumerate(stack) if frame.filename == call.__code__.co_filename]
    return "".join(traceback.format_list(stack[callers[-1] + 1 if callers else 0 :]))

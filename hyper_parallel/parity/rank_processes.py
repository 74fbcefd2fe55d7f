"""The parent's side of one rank server and the ranks it forked: requests out, replies and deaths in.

Every rank has a socket of its own to the parent, and the server has one more on which it says which of its
children ended and how. Frames are length-prefixed pickles; the standard streams of a rank belong to its log.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

SCHEDULER = -1
SERVER = -2
CLOSE = b""

# Others may be about to report the same mistake, or about to hang because of it: long enough for the first.
_GRACE = 3.0
_LENGTH = struct.Struct("!Q")


def send_frame(sock: socket.socket, payload: bytes) -> None:
    """Write one frame. Raises OSError when the other end is gone or the socket's time-out passes."""
    sock.sendall(_LENGTH.pack(len(payload)))
    sock.sendall(payload)


def receive_frame(sock: socket.socket, deadline: float | None = None) -> bytes:
    """Read one frame. Raises EOFError when the other end is gone, TimeoutError after ``deadline`` (monotonic)."""
    (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size, deadline))
    return _receive(sock, length, deadline)


def _receive(sock: socket.socket, length: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < length:
        if deadline is not None:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            chunk = sock.recv(min(length - len(data), 1 << 20))
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise EOFError("the other end closed the connection")
        data += chunk
    return bytes(data)


def log_file(log_dir: Path, member: int) -> Path:
    """The log of a rank, or of ``SCHEDULER`` or ``SERVER``."""
    return log_dir / {SCHEDULER: "scheduler.log", SERVER: "server.log"}.get(member, f"rank{member}.log")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the server is told first, before it imports a framework."""

    platform: str
    world_size: int
    start_timeout: float
    threads: int
    log_dir: str
    sys_path: tuple[str, ...]


@dataclass(slots=True)
class Outcome:
    """What one call came to. ``exits`` holds exit codes (negative: a signal), None where nobody could tell."""

    results: dict[int, bytes] = field(default_factory=dict)
    tracebacks: dict[int, str] = field(default_factory=dict)
    exits: dict[int, int | None] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    timed_out: bool = False

    @property
    def failed(self) -> bool:
        """Whether anything but a result from every rank came back."""
        return bool(self.tracebacks or self.exits or self.silent)


class RankProcesses:
    """One rank server and its ranks, from start to end. Not thread-safe."""

    def __init__(self, options: ServerOptions) -> None:
        pairs = [socket.socketpair() for _ in range(options.world_size + 1)]
        (self._control, *self._ranks) = (ours for ours, _ in pairs)
        self._pids: dict[int, int] = {}
        theirs = [end for _, end in pairs]
        package_root = str(Path(__file__).resolve().parents[2])
        search = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
        threads = str(options.threads)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(search),
            "HYPER_PARALLEL_PLATFORM": options.platform,
            "HYPER_PARALLEL_THREADS": threads,
            # Read when a framework's or NumPy's libraries load, which is before any hook of ours runs.
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), threads),
        }
        descriptors = [end.fileno() for end in theirs]
        with log_file(Path(options.log_dir), SERVER).open("ab") as log:
            # A session of its own: Ctrl-C is the parent's to handle, and one killpg ends whatever is left.
            self._server = subprocess.Popen(
                [sys.executable, "-m", "hyper_parallel.parity.rank_server", *map(str, descriptors)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                pass_fds=descriptors, start_new_session=True,
            )  # fmt: skip
        for end in theirs:
            end.close()
        with contextlib.suppress(OSError):  # a server that ended at once shows in join()
            send_frame(self._control, pickle.dumps(options))

    def join(self, seconds: float) -> Outcome:
        """Wait until every rank has joined its peers; the results are empty."""
        return self._collect(time.monotonic() + seconds)

    def call(self, request: bytes, seconds: float) -> Outcome:
        """Send one request to every rank and wait for the replies, ``seconds`` in all."""
        deadline = time.monotonic() + seconds
        for sock in self._ranks:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            # A rank that is dead or does not read shows in what comes back, with its exit status.
            with contextlib.suppress(OSError):
                send_frame(sock, request)
        return self._collect(deadline)

    def dump_stacks(self, ranks: tuple[int, ...]) -> None:
        """Have these ranks write their Python stacks to their logs, so that a hang shows where it hangs."""
        for rank in ranks:
            if rank in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.2)

    def close(self, seconds: float = 5.0) -> None:
        """Let the ranks leave their group, then end every process. Never raises for a process that will not."""
        for sock in self._ranks:
            sock.settimeout(seconds)
            with contextlib.suppress(OSError):
                send_frame(sock, CLOSE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """End every process now."""
        # The server sees the end of its control socket, and kills and reaps its children: no zombies are left
        # to an init process that a container may not have. Only a stuck server is killed with its group.
        for sock in (self._control, *self._ranks):
            sock.close()
        try:
            self._server.wait(3.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()

    def _collect(self, deadline: float) -> Outcome:
        outcome = Outcome()
        open_ranks = set(range(len(self._ranks)))
        gone: set[int] = set()
        hurried = False
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ, SERVER)
            for rank, sock in enumerate(self._ranks):
                selector.register(sock, selectors.EVENT_READ, rank)
            while (open_ranks or gone - outcome.exits.keys()) and not self._server_failed(outcome):
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    outcome.timed_out = not hurried
                    break
                for key, _ in events:
                    if key.data == SERVER:
                        self._read_control(outcome, deadline)
                        continue
                    selector.unregister(key.fileobj)
                    with contextlib.suppress(TimeoutError):  # half a reply: as silent as none
                        if not self._read_reply(key.data, outcome, deadline):
                            gone.add(key.data)
                        open_ranks.discard(key.data)
                if not hurried and (gone or outcome.failed):
                    hurried = True
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if not self._server_failed(outcome):  # it takes every rank with it, which says nothing about them
            outcome.exits.update(dict.fromkeys(gone - outcome.exits.keys()))
            outcome.silent = tuple(sorted(open_ranks - outcome.exits.keys()))
        return outcome

    def _read_reply(self, rank: int, outcome: Outcome, deadline: float) -> bool:
        try:
            kind, value = pickle.loads(receive_frame(self._ranks[rank], deadline))
        except EOFError:
            return False
        if kind == "result":
            outcome.results[rank] = value
        else:
            outcome.tracebacks[rank] = value
        return True

    def _read_control(self, outcome: Outcome, deadline: float) -> None:
        try:
            kind, member, value = pickle.loads(receive_frame(self._control, deadline))
        except (EOFError, TimeoutError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(1.0)
            outcome.exits[SERVER] = self._server.returncode
            return
        if kind == "pid":
            self._pids[member] = value
        elif kind == "exit":
            outcome.exits[member] = value
        else:
            outcome.tracebacks[member] = value

    def _server_failed(self, outcome: Outcome) -> bool:
        return SERVER in outcome.exits or SERVER in outcome.tracebacks

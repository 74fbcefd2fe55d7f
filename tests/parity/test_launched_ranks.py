"""The judge's side of a launcher's ranks, with threads for ranks: what is said of which rank, and who may connect."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import pytest

from hyper_parallel.parity import launched_ranks
from hyper_parallel.parity.launched_ranks import LaunchedRanks
from hyper_parallel.parity.launcher import Launch
from hyper_parallel.parity.pool import Interrupted, RankFailure

KEY = b"a key"
CASE = "some.module:run_case"
pytestmark = pytest.mark.timeout(60)

Rank = Callable[[Connection, tuple[Any, ...]], None]


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(("127.0.0.1", 0), "AF_INET", backlog=16, authkey=KEY) as listening:
        yield listening


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched_ranks, "_GRACE", 0.5)
    monkeypatch.setattr(launched_ranks, "_STACK_SECONDS", 1.0)


def answer(value: object) -> Rank:
    return lambda connection, request: connection.send(("result", pickle.dumps(value)))


def fail(text: str) -> Rank:
    return lambda connection, request: connection.send(("error", text))


def die(after: float = 0.0) -> Rank:
    def close(connection: Connection, request: tuple[Any, ...]) -> None:
        time.sleep(after)
        connection.close()

    return close


def be_told_to_end(connection: Connection, request: tuple[Any, ...]) -> None:
    connection.send(("signal", "SIGTERM"))


def hang(connection: Connection, request: tuple[Any, ...]) -> None:
    """Say nothing; the thread below says where it is when it is asked."""


def live(connection: Connection, rank: int, script: list[Rank], ends: list[Any]) -> None:
    """Answer the calls by the script, the last of which stays, and stack requests."""
    connection.send(rank)
    calls = iter(script)
    act = script[0]
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = connection.recv()
            if request[0] == "close":
                ends.append((rank, request[1]))
                return
            if request[0] == "stack":
                connection.send(("stack", f"stack of {rank}"))
                continue
            act = next(calls, act)
            act(connection, request)


def started(listener: Listener, scripts: list[list[Rank]]) -> tuple[LaunchedRanks, list[Any]]:
    ends: list[Any] = []
    ranks = LaunchedRanks(listener, Launch("torchrun", "torch", len(scripts), 0), start_timeout=10)

    def connect(rank: int) -> None:
        live(Client(listener.address, authkey=KEY), rank, scripts[rank], ends)

    for rank in reversed(range(len(scripts))):
        threading.Thread(target=connect, args=(rank,), daemon=True).start()
    ranks.__enter__()
    return ranks, ends


def message(ranks: LaunchedRanks, timeout: float = 20.0) -> str:
    with pytest.raises(RankFailure) as failure:
        ranks.run(CASE, timeout=timeout, label="a case")
    return str(failure.value)


IN_STEP = answer(True)


def test_results_come_in_rank_order_whoever_connects_first(listener: Listener) -> None:
    ranks, ends = started(listener, [[answer("a")], [answer("b")], [answer("c")]])
    assert ranks.run(CASE, timeout=5, label="a case") == ["a", "b", "c"]
    assert ranks.ended is None
    ranks.close(3)
    deadline = time.monotonic() + 5
    while len(ends) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert sorted(ends) == [(0, 3), (1, 3), (2, 3)]


def test_an_error_that_leaves_the_ranks_in_step_ends_nothing(listener: Listener) -> None:
    ranks, _ = started(listener, [[fail("Oops"), IN_STEP, answer(1)], [fail("Oops"), IN_STEP, answer(2)]])
    text = message(ranks)
    assert text.startswith("a case (some.module:run_case) failed on 2 ranks of torch, started by torchrun")
    assert "rank 0, rank 1 raised:\nOops" in text
    assert ranks.ended is None
    assert ranks.run(CASE, timeout=5, label="the next") == [1, 2]


@pytest.mark.parametrize("roll_call", [answer(False), fail("lost"), hang, die()])
def test_an_error_that_leaves_them_out_of_step_ends_all(roll_call: Rank, listener: Listener) -> None:
    ranks, _ = started(listener, [[fail("Oops"), IN_STEP], [answer(1), roll_call]])
    assert "ranks that finished: [1]" in message(ranks, timeout=1.0)
    assert ranks.ended is not None
    assert "since 'a case' failed" in ranks.ended
    with pytest.raises(RankFailure, match="since 'a case' failed"):
        ranks.run(CASE, timeout=5, label="the next")


def test_a_rank_that_raises_alone_leaves_the_others_waiting(listener: Listener) -> None:
    start = time.monotonic()
    ranks, _ = started(listener, [[hang], [fail("Oops")], [hang]])
    text = message(ranks)
    assert time.monotonic() - start < 10, "it does not wait for the time-out"
    assert "rank 1 raised:\nOops" in text
    assert "no answer from ranks [0, 2]" in text
    assert "-- rank 0 was here:\nstack of 0\n-- rank 2 was here:\nstack of 2" in text
    assert ranks.ended


def test_silence_is_a_time_out(listener: Listener) -> None:
    ranks, _ = started(listener, [[answer(1)], [hang]])
    text = message(ranks, timeout=0.5)
    assert "timed out after 0.5 s; silent ranks: [1]" in text
    assert "ranks that finished: [0]" in text
    assert ranks.ended


def test_the_first_rank_to_die_is_named_first(listener: Listener) -> None:
    ranks, _ = started(listener, [[die(0.3)], [hang], [die()], [be_told_to_end]])
    text = message(ranks)
    assert "rank 2 died: its connection was lost first\nthen those of rank 0, which torchrun may" in text
    assert "torchrun told rank 3 to end (SIGTERM)" in text
    assert ranks.ended


def test_ranks_that_are_told_to_end_have_not_failed(listener: Listener) -> None:
    def finish(connection: Connection, request: tuple[Any, ...]) -> None:
        be_told_to_end(connection, request)
        answer(1)(connection, request)

    ranks, _ = started(listener, [[finish], [be_told_to_end]])
    with pytest.raises(Interrupted, match=r"in 'a case': torchrun told rank 0, rank 1 to end \(SIGTERM\)"):
        ranks.run(CASE, timeout=20, label="a case")
    assert ranks.ended
    assert "told rank 0" in ranks.ended


def test_ranks_that_never_come_are_named(listener: Listener) -> None:
    ranks = LaunchedRanks(listener, Launch("msrun", "mindspore", 3, 0), start_timeout=0.5)
    with pytest.raises(RankFailure, match=r"ranks \[0, 1, 2\] of 3 did not connect"):
        ranks.__enter__()


def test_strangers_are_not_let_in(listener: Listener) -> None:
    """One without the key, one that says nothing, and one that only knocks, as ranks do before they connect."""
    socket.create_connection(listener.address).close()  # type: ignore[arg-type]
    silent = socket.create_connection(listener.address)  # type: ignore[arg-type]

    def intrude() -> None:
        with pytest.raises(AuthenticationError):
            Client(listener.address, authkey=b"another key")

    intruder = threading.Thread(target=intrude)
    intruder.start()
    ranks, _ = started(listener, [[answer("a")]])
    intruder.join(10)
    assert not intruder.is_alive()
    silent.close()
    assert ranks.run(CASE, timeout=5, label="a case") == ["a"]

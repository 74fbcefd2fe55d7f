"""The pool of ranks: real processes, real collectives, and every way in which a rank can fail."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.parity.pool import RankFailure, RankPool

BACKENDS = os.environ.get("HYPER_PARALLEL_TEST_BACKENDS", "torch,mindspore").split(",")
needs_torch = pytest.mark.skipif("torch" not in BACKENDS, reason="HYPER_PARALLEL_TEST_BACKENDS without torch")
needs_mindspore = pytest.mark.skipif(
    "mindspore" not in BACKENDS, reason="HYPER_PARALLEL_TEST_BACKENDS without mindspore"
)
pytestmark = pytest.mark.timeout(120)


def target(function: Any) -> str:
    return f"{__name__}:{function.__name__}"


def rank_number() -> int:
    return int(os.environ["RANK_ID" if os.environ["HYPER_PARALLEL_PLATFORM"] == "mindspore" else "RANK"])


def all_reduce(value: float) -> list[float]:
    """Sum ``value + rank`` over all ranks."""
    if os.environ["HYPER_PARALLEL_PLATFORM"] == "mindspore":
        import mindspore

        cell = mindspore.Tensor([value + rank_number()])
        mindspore.mint.distributed.all_reduce(cell)
        return cell.asnumpy().tolist()
    import torch

    tensor = torch.tensor([value + rank_number()])
    torch.distributed.all_reduce(tensor)
    return tensor.tolist()


def rank_and_argument(value: object) -> tuple[int, object]:
    time.sleep(0.05 * (3 - rank_number()))  # the last rank answers first
    return rank_number(), value


def raise_on(rank: int) -> None:
    if rank_number() == rank:
        print(f"rank {rank} is about to raise")
        raise ZeroDivisionError("the mistake of one rank")
    all_reduce(0.0)


def raise_everywhere() -> None:
    raise ZeroDivisionError("the mistake of every rank")


def hang_on(rank: int) -> None:
    while rank_number() == rank:
        time.sleep(0.1)


def crash_on(rank: int) -> None:
    if rank_number() == rank:
        ctypes.string_at(0)
    all_reduce(0.0)


def exit_on(rank: int) -> None:
    if rank_number() == rank:
        os._exit(7)


def system_exit() -> None:
    sys.exit("leaving")


def kill_parent_on(rank: int) -> None:
    if rank_number() == rank:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(30)


def return_unpicklable() -> object:
    return lambda: None


def session() -> int:
    return os.getsid(0)


def variables() -> tuple[str, str, int]:
    import torch

    return os.environ["HYPER_PARALLEL_PLATFORM"], os.environ["OMP_NUM_THREADS"], torch.get_num_threads()


def living(session_id: int) -> list[str]:
    """The processes of a session that are not zombies; a pool is a session of its own."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(sid) == session_id and state != "Z":
            found.append(stat.parent.name)
    return found


def wait_until_gone(session_id: int) -> None:
    end = time.monotonic() + 10
    while living(session_id):
        assert time.monotonic() < end, f"still alive: {living(session_id)}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    with RankPool("torch", 3, log_dir=str(tmp_path_factory.mktemp("ranks"))) as ranks:
        yield ranks


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "platform", [pytest.param("torch", marks=needs_torch), pytest.param("mindspore", marks=needs_mindspore)]
)
def test_ranks_reduce_together(platform: str, world_size: int) -> None:
    with RankPool(platform, world_size) as ranks:
        total = sum(1.0 + rank for rank in range(world_size))
        assert ranks.run(target(all_reduce), 1.0) == [[total]] * world_size


@needs_mindspore
def test_mindspore_pool_recovers_from_an_exception_and_a_crash(tmp_path: Path) -> None:
    with RankPool("mindspore", 2, log_dir=str(tmp_path)) as ranks:
        with pytest.raises(
            RankFailure, match=r"(?s)rank 0 raised:.*ZeroDivisionError.*no answer from ranks \[1\]"
        ):
            ranks.run(target(raise_on), 0)
        with pytest.raises(RankFailure, match=r"rank 1 died \(signal 11: Segmentation fault\)"):
            ranks.run(target(crash_on), 1)
        assert ranks.run(target(all_reduce), 1.0) == [[3.0], [3.0]]
        session_id = ranks.run(target(session))[0]
    assert living(session_id) == []


@needs_torch
def test_results_come_in_rank_order_and_calls_share_the_processes(pool: RankPool) -> None:
    assert pool.run(target(rank_and_argument), {"a": (1, None)}) == [(r, {"a": (1, None)}) for r in range(3)]
    assert pool.run(target(all_reduce), 1.0) == [[6.0]] * 3
    first, second = pool.run(target(session)), pool.run(target(session))
    assert first == second
    assert not pool.broken


@needs_torch
def test_arguments_and_results_may_be_larger_than_a_socket_buffer(pool: RankPool) -> None:
    blob = os.urandom(1 << 23)
    assert pool.run(target(rank_and_argument), blob) == [(rank, blob) for rank in range(3)]


@needs_torch
def test_ranks_know_their_platform_and_number_of_threads(pool: RankPool) -> None:
    assert pool.run(target(variables)) == [("torch", "1", 1)] * 3


@needs_torch
def test_an_exception_on_one_rank_names_it_and_does_not_wait_for_the_time_out(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        pool.run(target(raise_on), 1, timeout=60, label="a case")
    assert time.monotonic() - start < 20
    message = str(failure.value)
    assert message.startswith(f"a case ({target(raise_on)}) failed on 3 ranks of torch")
    assert "rank 1 raised:\nTraceback" in message
    assert "in raise_on" in message
    assert "ZeroDivisionError: the mistake of one rank" in message
    assert "no answer from ranks [0, 2]" in message
    assert "end of rank1.log:\n   rank 1 is about to raise" in message
    assert pool.broken


@needs_torch
def test_the_next_call_after_a_failure_starts_new_processes(pool: RankPool) -> None:
    before = pool.run(target(session))[0]
    with pytest.raises(RankFailure):
        pool.run(target(raise_everywhere))
    assert pool.broken
    assert living(before) == []
    assert pool.run(target(all_reduce), 1.0) == [[6.0]] * 3
    assert not pool.broken


@needs_torch
def test_the_same_exception_on_every_rank_is_told_once(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="rank 0, rank 1, rank 2 raised:") as failure:
        pool.run(target(raise_everywhere))
    assert str(failure.value).count("ZeroDivisionError: the mistake of every rank") == 1


@needs_torch
def test_a_hanging_rank_is_named_with_the_time_out_and_where_it_hangs(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"timed out after 2 s; silent ranks: \[2\]") as failure:
        pool.run(target(hang_on), 2, timeout=2)
    assert "in hang_on" in str(failure.value)
    assert "ranks that finished: [0, 1]" in str(failure.value)


@needs_torch
def test_a_dead_rank_is_named_with_what_it_died_of(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"rank 0 died \(signal 11: Segmentation fault\)") as failure:
        pool.run(target(crash_on), 0)
    assert "in crash_on" in str(failure.value)
    with pytest.raises(RankFailure, match="rank 1 ended with exit status 7"):
        pool.run(target(exit_on), 1)


@needs_torch
def test_the_death_of_the_server_takes_the_ranks_with_it(pool: RankPool) -> None:
    session_id = pool.run(target(session))[0]
    with pytest.raises(RankFailure, match=r"the rank server died \(signal 9: Killed\)"):
        pool.run(target(kill_parent_on), 0)
    wait_until_gone(session_id)


@needs_torch
def test_what_cannot_be_called_or_pickled_is_reported(pool: RankPool) -> None:
    with pytest.raises(ValueError, match=r"package\.module:function"):
        pool.run("no_colon")
    with pytest.raises(RankFailure, match="ModuleNotFoundError: No module named 'no_such_module'"):
        pool.run("no_such_module:function")
    with pytest.raises(RankFailure, match="SystemExit: leaving"):
        pool.run(target(system_exit))
    with pytest.raises(RankFailure, match="return_unpicklable"):
        pool.run(target(return_unpicklable))


@needs_torch
def test_close_leaves_neither_processes_nor_logs() -> None:
    ranks = RankPool("torch", 2)
    session_id = ranks.run(target(session))[0]
    assert len(living(session_id)) == 3
    log_dir = ranks._log_dir
    assert (log_dir / "rank1.log").exists()
    ranks.close()
    assert living(session_id) == []
    assert not log_dir.exists()
    ranks.close()
    with pytest.raises(RuntimeError, match="closed"):
        ranks.run(target(session))


@pytest.mark.parametrize(
    ("platform", "busy"),
    [
        pytest.param("torch", False, marks=needs_torch),
        pytest.param("torch", True, marks=needs_torch),
        pytest.param("mindspore", False, marks=needs_mindspore),
    ],
)
def test_ranks_die_with_a_parent_that_is_killed(platform: str, busy: bool, tmp_path: Path) -> None:
    script = f"""
import sys, time
sys.path[:] = {sys.path!r}
from hyper_parallel.parity.pool import RankPool
pool = RankPool({platform!r}, 2, log_dir={str(tmp_path)!r})
print(pool.run({target(session)!r})[0], flush=True)
{f"pool.run({target(hang_on)!r}, 0)" if busy else "time.sleep(100)"}
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        session_id = int(parent.stdout.readline())
        assert len(living(session_id)) >= 3
        parent.kill()
    wait_until_gone(session_id)


def test_an_unknown_platform_is_named_with_the_installed_ones(tmp_path: Path) -> None:
    with pytest.raises(
        RankFailure, match=r"no entry point 'nobody' in group .*; installed: \['mindspore', 'torch'\]"
    ):
        RankPool("nobody", 1, log_dir=str(tmp_path)).run("any:thing")


def test_a_pool_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        RankPool("torch", 0)

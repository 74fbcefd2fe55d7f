"""The parity suite on torchrun's ranks: real launches on the CPU, and every way in which a rank can go wrong."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from hyper_parallel.parity.cases import selected_cases
from tests.parity.launches import (
    BIN,
    FAILING,
    environment,
    failure,
    free_port,
    report,
    running_in,
    torchrun,
    verdicts,
    wait_until,
)  # fmt: skip

BACKENDS = os.environ.get("HYPER_PARALLEL_TEST_BACKENDS", "torch,mindspore").split(",")
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif("torch" not in BACKENDS, reason="HYPER_PARALLEL_TEST_BACKENDS without torch"),
]
SOME = ("--select", "fsdp", "float32", "--report", "out")


@pytest.mark.parametrize("ranks", [1, 4])
def test_runs_the_cases_on_the_ranks_it_is_given(ranks: int, tmp_path: Path) -> None:
    done = torchrun(tmp_path, ranks, *SOME)
    assert done.returncode == 0, done.stdout
    document = report(tmp_path / "out")
    expected = [case.name for case in selected_cases((ranks,), ("fsdp", "float32"))]
    assert [case["name"] for case in document["cases"]] == expected
    assert set(verdicts(document, "torch").values()) == {"passed"}
    found = document["environment"]
    assert (found["launcher"], found["device"]) == ("torchrun", "cpu")
    assert found["platforms"]["torch"]["backend"] == "gloo"
    assert [each["rank"] for each in found["platforms"]["torch"]["ranks"]] == list(range(ranks))
    assert done.stdout.count(f"{len(expected)} passed, 0 failed") == 1, "one rank alone prints"


def test_goes_on_after_mistakes_that_leave_the_ranks_in_step(tmp_path: Path) -> None:
    mistakes = "fsdp+plain=wrong;fsdp on dim 1=raise_everywhere;tp+fsdp=raise_on_one"
    done = torchrun(tmp_path, 2, mistakes, *SOME, "--timeout", "60", program=[FAILING])
    assert done.returncode != 0
    document = report(tmp_path / "out")
    assert verdicts(document, "torch") == {
        "fsdp": "passed",
        "fsdp+plain": "failed",
        "fsdp on dim 1": "failed",
        "partial+fsdp": "passed",
        "tp+fsdp": "failed",
        "pipeline+fsdp": "not run",
    }
    assert "the ranks disagree on the norm" in failure(document, "torch", "fsdp+plain")
    assert "on rank 1, expected" in failure(document, "torch", "fsdp+plain")
    everywhere = failure(document, "torch", "fsdp on dim 1")
    assert "rank 0, rank 1 raised:" in everywhere
    assert everywhere.count("ZeroDivisionError: no fsdp on dim 1 here") == 1
    alone = failure(document, "torch", "tp+fsdp")
    assert "rank 1 raised:" in alone
    assert "ZeroDivisionError: the mistake of rank 1" in alone
    assert "no answer from ranks [0]" in alone
    assert "-- rank 0 was here:" in alone
    assert "in all_reduce" in alone
    reason = document["cases"][-1]["platforms"]["torch"]["reason"]
    assert "out of step since 'tp+fsdp, float32, 2 ranks' failed" in reason
    # Each rank ends with a failure, whether it hangs or waits: the launcher reports the first one's.
    assert "exitcode" in done.stdout.lower()


def test_a_hanging_rank_is_named_after_the_time_out(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, "fsdp on dim 1=hang_on_one", *SOME, "--timeout", "6", program=[FAILING])
    assert done.returncode != 0
    document = report(tmp_path / "out")
    assert verdicts(document, "torch")["fsdp on dim 1"] == "failed"
    assert verdicts(document, "torch")["partial+fsdp"] == "not run"
    text = failure(document, "torch", "fsdp on dim 1")
    assert "timed out after 6 s; silent ranks: [0, 1]" in text
    assert "in hang_on_one" in text.partition("-- rank 1 was here:")[2]


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 2, "fsdp+plain=die_on_one", *SOME, program=[FAILING])
    assert done.returncode != 0
    document = report(tmp_path / "out")
    assert "rank 1 died: its connection was lost" in failure(document, "torch", "fsdp+plain")
    assert "rank 0 died" not in failure(document, "torch", "fsdp+plain")
    assert verdicts(document, "torch")["fsdp"] == "passed"
    assert verdicts(document, "torch")["fsdp on dim 1"] == "not run"


def test_runs_on_an_npu(tmp_path: Path) -> None:
    """A simulated one, with HCCL's rules; the roll call after a mistake reduces on it, too."""
    mistake = ("fsdp+plain=raise_everywhere", "--device", "npu")
    root = str(Path(__file__).resolve().parents[2])
    done = torchrun(tmp_path, 2, *mistake, *SOME, program=[FAILING], PYTHONPATH=root)
    assert done.stdout.count("exit status 1") == 2, "on every rank"
    document = report(tmp_path / "out")
    found = verdicts(document, "torch")
    assert found.pop("fsdp+plain") == "failed"
    assert set(found.values()) == {"passed"}, done.stdout
    assert len(found) == 5
    environment = document["environment"]
    assert (environment["device"], environment["platforms"]["torch"]["backend"]) == ("npu", "hccl")


def test_a_device_that_is_not_there_is_reported_at_once(tmp_path: Path) -> None:
    done = torchrun(tmp_path, 1, "--device", "nowhere", *SOME)
    assert done.returncode != 0
    document = report(tmp_path / "out")
    assert set(verdicts(document, "torch").values()) == {"not run"}
    reason = document["cases"][0]["platforms"]["torch"]["reason"]
    assert "the ranks did not come together" in reason
    assert "finds no nowhere device" in reason
    assert "Traceback" not in reason
    assert "parity: torch " in done.stdout


def test_a_start_that_fails_is_reported_though_rank_0_is_killed(tmp_path: Path) -> None:
    """Rank 1 ends while rank 0 waits for it, so that torchrun ends rank 0."""
    script = tmp_path / "start.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "from hyper_parallel.parity.command import main\n"
        "from hyper_parallel_torch import local_ranks\n"
        "joining, join = pathlib.Path('joining'), local_ranks.join_launched\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not joining.exists():\n"
        "        time.sleep(0.05)\n"
        "    sys.exit('the mistake of rank 1')\n"
        "local_ranks.join_launched = lambda *how: (joining.touch(), join(*how))\n"
        "sys.exit(main())\n"
    )
    done = torchrun(tmp_path, 2, *SOME, program=[str(script)])
    assert done.returncode != 0
    document = report(tmp_path / "out")
    assert set(verdicts(document, "torch").values()) == {"not run"}
    assert "rank 0 ended before" in document["cases"][0]["platforms"]["torch"]["reason"]


def test_ctrl_c_leaves_a_report_and_no_process(tmp_path: Path) -> None:
    launcher = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", FAILING]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [*launcher, "fsdp on dim 1=hang_on_one", *SOME],
            cwd=tmp_path, env=environment(), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    wait_until((tmp_path / "hanging1").exists)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    wait_until(lambda: not running_in(tmp_path))
    document = report(tmp_path / "out")
    assert (document["passed"], document["failed"], document["not_run"]) == (2, 0, 4)
    expected = (
        "interrupted in 'fsdp on dim 1, float32, 2 ranks': torchrun told rank 0, rank 1 to end (SIGINT)"
    )
    assert {case["platforms"]["torch"]["reason"] for case in document["cases"][2:]} == {expected}


def test_nodes_with_other_names_meet_at_the_masters_address(tmp_path: Path) -> None:
    """Two nodes, as far as one machine can have them: each has its own host name and launcher."""
    script = tmp_path / "node.py"
    script.write_text(
        "import os, socket, sys\n"
        "from hyper_parallel.parity.command import main\n"
        "socket.gethostname = socket.getfqdn = lambda *name: 'node' + os.environ['GROUP_RANK'] + '.invalid'\n"
        "sys.exit(main())\n"
    )
    port = str(free_port())
    static = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    nodes = [
        subprocess.Popen(
            [str(BIN / "torchrun"), *static, "--node-rank", str(rank), str(script), *SOME],
            cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=150)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    document = report(tmp_path / "out")
    hosts = [each["host"] for each in document["environment"]["platforms"]["torch"]["ranks"]]
    assert hosts == ["node0.invalid", "node1.invalid"]
    assert document["verdict"] == "passed"


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--platforms", "mindspore"], {}, "the ranks of torchrun run torch, but"),
        (["--platforms", "torch", "mindspore"], {}, "the ranks of torchrun run torch, but"),
        (["--world-sizes", "1", "2"], {}, "torchrun has started 1 ranks"),
        ([], {"HYPER_PARALLEL_PLATFORM": "mindspore"}, "HYPER_PARALLEL_PLATFORM asks for mindspore"),
        ([], {"HYPER_PARALLEL_PLATFORM": "nobody"}, "no entry point 'nobody'"),
    ],
)
def test_what_does_not_fit_the_launcher_is_refused(
    arguments: list[str], variables: dict[str, str], message: str, tmp_path: Path
) -> None:
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [str(BIN / "python"), "-m", "hyper_parallel.parity", *arguments],
        cwd=tmp_path,
        env=environment(TORCHELASTIC_RUN_ID="1", MASTER_PORT="1", **launched, **variables),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr

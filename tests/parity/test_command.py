"""The command line of the parity suite, on ranks of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hyper_parallel.parity.command import mount, spread
from tests.parity.launches import environment, report, running_in, verdicts, wait_until

BACKENDS = os.environ.get("HYPER_PARALLEL_TEST_BACKENDS", "torch,mindspore").split(",")
pytestmark = pytest.mark.timeout(150)


def parity(folder: Path, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``python -m hyper_parallel.parity``, after ``code``."""
    start = f"{code}\nimport runpy, sys; runpy.run_module('hyper_parallel.parity', run_name='__main__', alter_sys=True)"
    return subprocess.run(
        [sys.executable, "-c", start, *arguments],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=140, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("", ""),
        ("--platforms torch mindspore", "--platforms torch --platforms mindspore"),
        ("--select a b --device npu --select c", "--select a --select b --device npu --select c"),
        ("--world-sizes 1 2 --report out extra", "--world-sizes 1 --world-sizes 2 --report out extra"),
        ("--select --help", "--select --help"),
    ],
)
def test_spread_repeats_the_option(given: str, meant: str) -> None:
    assert spread(given.split()) == meant.split()


def test_runs_on_every_platform_and_reports(tmp_path: Path) -> None:
    done = parity(
        tmp_path, "--platforms", *BACKENDS, "--world-sizes", "1", "--select", "fsdp", "float32", "--report", "out"
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    document = report(tmp_path / "out")
    for name in BACKENDS:
        assert set(verdicts(document, name).values()) == {"passed"}
        assert document["environment"]["platforms"][name]["versions"][name]
        (rank,) = document["environment"]["platforms"][name]["ranks"]
        assert rank["device"].startswith("CPU")
    assert document["environment"]["launcher"] == "this command"
    assert document["schema"] == "hyper-parallel-parity/1"
    assert "4 passed, 0 failed" in done.stdout
    assert all(str(tmp_path / "out" / name) in done.stdout for name in ("junit.xml", "parity.html"))


def test_a_platform_that_does_not_start_is_reported(tmp_path: Path) -> None:
    done = parity(
        tmp_path, "--platforms", "nobody", "--world-sizes", "1", "--select", "fsdp", "--report", "out"
    )
    assert done.returncode == 1
    document = report(tmp_path / "out")
    assert set(verdicts(document, "nobody").values()) == {"not run"}
    reason = document["cases"][0]["platforms"]["nobody"]["reason"]
    assert "no entry point 'nobody'" in reason
    assert done.stdout.count("no entry point 'nobody'") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "file"], "--report file: cannot write there: File exists"),
        (["--report", "file/below"], "--report file/below: cannot write there: Not a directory"),
        (["--device", "npu"], "without a launcher the ranks of torch and mindspore are on the cpu; for npu"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = parity(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_a_report_and_no_process(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from hyper_parallel.parity import suite\n"
        "run_on = suite.run_on\n"
        "def third(pool, case, *rest):\n"
        "    if case.parallelism == 'fsdp on dim 1':\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "    return run_on(pool, case, *rest)\n"
        "suite.run_on = third\n"
    )
    some = (
        "--select",
        "fsdp",
        "float32",
        "--report",
        "out",
        "--platforms",
        BACKENDS[0],
        "--world-sizes",
        "1",
        "2",
    )
    done = parity(tmp_path, *some, code=code)
    assert done.returncode == 1
    document = report(tmp_path / "out")
    assert (document["passed"], document["failed"], document["not_run"]) == (2, 0, 8)
    reasons = {case["platforms"][BACKENDS[0]]["reason"] for case in document["cases"][2:]}
    assert reasons == {"interrupted by SIGINT or SIGTERM"}
    wait_until(lambda: not running_in(tmp_path))


def test_a_selection_of_nothing_is_refused(tmp_path: Path) -> None:
    done = parity(tmp_path, "--world-sizes", "2", "--select", "fsdp", "no such case")
    assert done.returncode == 2
    assert "no case for 2 ranks has all of these words: fsdp no such case" in done.stderr


@pytest.mark.parametrize("package", ["typer", "jinja2", "junitparser", "numpy", "rich"])
def test_a_missing_package_is_named_with_its_remedy(package: str, tmp_path: Path) -> None:
    done = parity(tmp_path, "--world-sizes", "1", code=f"import sys; sys.modules[{package!r}] = None")
    assert done.returncode != 0
    assert f"parity: {package} is missing: pip install 'hyper-parallel[parity]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_mounts_on_another_app() -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    mount(app)
    found = CliRunner().invoke(
        app, ["parity", "--world-sizes", "1", "2", "--select", "nothing", "like", "it"]
    )
    assert found.exit_code == 2
    assert "no case for 1 2 ranks has all of these words: nothing like it" in found.output
    assert "torchrun" in CliRunner().invoke(app, ["parity", "--help"]).output

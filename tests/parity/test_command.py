"""The command line of the parity suite, on ranks of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hyper_parallel.parity.command import mount, spread
from tests.parity.launches import environment, report, verdicts

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

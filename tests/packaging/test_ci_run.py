"""CI's script reports both gates: neither exit code is lost, and pytest's summary is the last line."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SUMMARY = "========= 3 passed in 0.12s ========="
FAILURE = "========= 1 failed, 2 passed in 61.00s (0:01:01) ========="


def ci_run(folder: Path, root: Path, lint: int, test: int, summary: str) -> tuple[int, list[str]]:
    """Run .ci/run beside a Makefile whose two gates end as given; its exit code and its output's lines."""
    (folder / ".ci").mkdir()
    shutil.copy(root / ".ci" / "run", folder / ".ci" / "run")
    makefile = f"lint:\n\t@exit {lint}\ntest:\n\t@echo '{summary}'; exit {test}\n"
    (folder / "Makefile").write_text(makefile)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["bash", folder / ".ci" / "run"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("lint", "test", "summary", "passes"),
    [
        (0, 0, SUMMARY, True),
        (1, 0, SUMMARY, False),
        (0, 1, FAILURE, False),
        (1, 1, FAILURE, False),
        (0, 5, "========= no tests ran in 0.01s =========", False),
    ],
)
def test_ci_run(tmp_path: Path, root: Path, lint: int, test: int, summary: str, passes: bool) -> None:
    code, lines = ci_run(tmp_path, root, lint, test, summary)
    assert (code == 0) is passes
    assert lines[-1] == summary

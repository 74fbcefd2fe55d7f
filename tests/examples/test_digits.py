"""The demo on handwritten digits, run as a person runs it: real processes, both backends, few epochs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import typer
from matplotlib.image import imread
from typer.testing import CliRunner

from hyper_parallel.parity.pool import RankFailure
from tests.named_backends import needs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOLERANCE = 1e-5
pytestmark = pytest.mark.timeout(240)


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In an empty folder, where nothing but its own script may help it."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "digits.py"), *arguments],
        cwd=folder, capture_output=True, text=True, timeout=220,
    )  # fmt: skip


def reported_difference(output: str, one: str, other: str) -> float:
    line = output.rstrip().splitlines()[-1]
    found = re.search(
        rf"Norms of {one} and {other} .*: largest relative difference (\S+) \(tolerance 1e-05\)$", line
    )
    assert found, output
    return float(found[1])


def assert_is_a_picture(path: Path) -> None:
    pixels = imread(path)
    height, width = pixels.shape[:2]
    assert height > 500
    assert width > 500
    colours = np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)
    assert len(colours) > 100  # curves with soft edges, not an empty sheet


# With 3 ranks, the last layer's 10 rows and their shards are uneven.
@needs("torch", "mindspore")
@pytest.mark.parametrize(("world_size", "mesh"), [(2, "2 x 1"), (3, "1 x 3")])
def test_both_backends_agree(world_size: int, mesh: str, tmp_path: Path) -> None:
    arguments = [
        "--world-size",
        str(world_size),
        "--epochs",
        "3",
        "--min-accuracy",
        "0.9",
        "--output",
        "a.png",
    ]
    demo = run_demo(tmp_path, *arguments)
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert f"on a {mesh} mesh" in demo.stdout
    assert reported_difference(demo.stdout, "torch", "mindspore") <= TOLERANCE
    assert_is_a_picture(tmp_path / "a.png")
    rows = re.findall(r"^ +([123]) +[\d.]+ +[\d.]+ +[\d.]+ +\d+% +[\d.]+%", demo.stdout, re.MULTILINE)
    assert rows == ["1", "2", "3"] * 2


@needs("torch")
def test_what_falls_short_is_named_and_fails(tmp_path: Path) -> None:
    arguments = ["--platform", "torch", "--world-size", "2", "--epochs", "1"]
    demo = run_demo(tmp_path, *arguments, "--min-accuracy", "1", "--tolerance", "1e-12")
    assert demo.returncode == 1, demo.stdout + demo.stderr
    assert re.search(r"FAILED: test accuracy of torch: \d\d\.\d%, below 100.0%", demo.stdout)
    assert re.search(r"FAILED: norms of torch and NumPy float64 differ by \S+, above 1e-12", demo.stdout)
    assert_is_a_picture(tmp_path / "demo.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "nowhere/demo.png"], "there is no folder nowhere"),
        (["--output", "demo.txt"], "must end in one of .pdf, .png, .svg"),
        (["--max-norm", "nan"], "--max-norm"),
        (["--world-size", "0"], "--world-size"),
        (["--platform", "abacus"], "--platform"),
    ],
)
def test_bad_options_are_refused_at_once(digits: ModuleType, arguments: list[str], message: str) -> None:
    result = invoke(digits, *arguments)
    assert result.exit_code == 2
    assert message in plain(result.output)


# ---- the verdict, without processes


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits

    return digits


def invoke(digits: ModuleType, *arguments: str):
    app = typer.Typer()
    app.command()(digits.main)
    return CliRunner().invoke(app, arguments)


def plain(output: str) -> str:
    """The text of a message that was broken into lines inside a frame."""
    return re.sub(r"[\s│]+", " ", output)


def failures(digits: ModuleType, *, norms: list[float], accuracy: float = 0.97, uneven: tuple[int, ...] = ()):
    losses = [1.0, 0.5]
    run = digits.Run("torch", 0.4, losses, norms, [accuracy], 1.0, list(uneven))
    reference = digits.Run("NumPy float64", 0.4, losses, [1.0, 0.5], [accuracy])
    return digits.find_failures([run], reference, 0.95, TOLERANCE)


def test_small_differences_pass(digits: ModuleType) -> None:
    assert failures(digits, norms=[1.0, 0.5 + 1e-6]) == []


@pytest.mark.parametrize("norms", [[1.0, 0.5 + 1e-5], [1.0, float("nan")], [float("inf"), 0.5]])
def test_norms_that_differ_fail(digits: ModuleType, norms: list[float]) -> None:
    (failure,) = failures(digits, norms=norms)
    assert failure.startswith("norms of torch and NumPy float64 differ by ")


def test_low_accuracy_fails(digits: ModuleType) -> None:
    assert failures(digits, norms=[1.0, 0.5], accuracy=0.94) == ["test accuracy of torch: 94.0%, below 95.0%"]


def test_ranks_that_disagree_fail(digits: ModuleType) -> None:
    (failure,) = failures(digits, norms=[1.0, 0.5], uneven=(1,))
    assert failure == "ranks of torch were given different norms in steps [1]"


def test_a_rank_that_fails_is_reported(digits: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RankFailure("rank 1 raised: [a mistake]")

    monkeypatch.setattr(digits, "train", fail)
    result = invoke(digits, "--platform", "torch", "--epochs", "1")
    assert result.exit_code == 2
    assert "FAILED: rank 1 raised: [a mistake]" in result.output

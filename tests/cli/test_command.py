"""The command as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli.app import app
from tests.cli.descriptions import HSDP, PARTIAL, PIPELINE, TP_FSDP


def run(tmp_path: Path, text: str, *arguments: str) -> tuple[int, str, str]:
    file = tmp_path / "model.yaml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["explain", str(file), *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_prints_the_plan(tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, TP_FSDP, "--rank", "9")
    assert code == 0
    for words in ("rank 9 of 1,024", "layers.{0..31}.attention.wq", "1,024: 0-1023", "host waits:"):
        assert words in out


@pytest.mark.parametrize("text", [HSDP, PIPELINE, PARTIAL])
def test_json_is_all_that_is_printed(text: str, tmp_path: Path) -> None:
    code, out, _ = run(tmp_path, text, "--json")
    assert code == 0
    assert json.loads(out)["format"] == 1


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (HSDP.replace("shard: 4", "shard: 5"), (), "model.yaml:4: meshes.world: the sizes 4 x 5 = 20"),
        (HSDP, ("--rank", "16"), "--rank 16: accepted: 0 to 15"),
        (HSDP, ("--picture", "out.pdf"), "accepted: .png, .svg"),
        (HSDP, ("--picture", "no/such/folder/out.png"), "cannot be written"),
        (HSDP, ("--picture", "out.png", "--parameter", "v"), "holds no such parameter; it holds: w, scale"),
        (TP_FSDP, ("--picture", "out.png"), "lies on 1,024 ranks; a picture is readable up to 64"),
    ],
)
def test_bad_input_exits_with_2(
    text: str, arguments: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, error = run(tmp_path, text, *arguments)
    assert (code, out) == (2, "")
    assert expected in error
    assert "Traceback" not in error


def test_missing_file() -> None:
    result = CliRunner().invoke(app, ["explain", "no-such.yaml"])
    assert result.exit_code == 2
    assert "no-such.yaml: cannot be read" in result.stderr


def test_as_a_module_without_a_framework(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(TP_FSDP)
    code = (
        "import sys; sys.argv[1:] = ['explain', sys.argv[1], '--json']\n"
        "from hyper_parallel.cli.__main__ import main\n"
        "try:\n    main()\n"
        "finally:\n    assert not {'torch', 'mindspore', 'matplotlib'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["totals"]["collectives"] == 1


def test_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['typer'] = None; from hyper_parallel.cli.__main__ import main\n"
        "main()\n"
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "typer is missing: pip install 'hyper-parallel[cli]'" in done.stderr

"""The command as a user runs it: exit status, JSON, tables, and a machine that has nothing but the command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import hyper_parallel
from hyper_parallel.cli import doctor
from hyper_parallel.cli.doctor.findings import Diagnosis, Findings
from hyper_parallel.cli.doctor.machine import read_machine
from hyper_parallel.cli.doctor.report import print_diagnosis
from hyper_parallel.cli.doctor.rules import RULES, find_problems
from tests.cli.doctor_device_cases import NO_HCCL
from tests.cli.doctor_findings import HEALTHY, INSTALLED_CANN, checked, importing, job, with_npus
from tests.cli.doctor_sites import install, install_platform

ROOT = Path(hyper_parallel.__file__).parents[1]
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """All that is installed: the core, and what the command needs of the extra ``cli``."""
    if read_machine().devices.npu_files:
        pytest.skip("a machine with NPUs and no framework for them has a problem of its own")
    folder = tmp_path / "site"
    folder.mkdir()
    for each in required("typer", "rich", "pyyaml"):
        for name in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            (folder / name).symlink_to(each.locate_file(name))
    (folder / "hyper_parallel").symlink_to(ROOT / "hyper_parallel", target_is_directory=True)
    return folder


def required(*names: str) -> list[Distribution]:
    """These distributions and those that they need in turn."""
    found: dict[str, Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.split(r"[^\w.-]", waiting.pop(), maxsplit=1)[0].lower().replace("_", "-")
        with suppress(PackageNotFoundError):  # one for another Python or system
            if name not in found:
                found[name] = distribution(name)
                waiting += [each for each in found[name].requires or () if "extra ==" not in each]
    return list(found.values())


def run(site: Path, *arguments: str, **environ: str) -> tuple[int, str, str]:
    """Start the command with nothing on the path but the standard library and ``site``."""
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r}); from hyper_parallel.cli.__main__ import main; main()"
    )
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, "doctor", *arguments],
        env=kept | environ, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def rules_of(out: str) -> list[str]:
    return [problem["rule"] for problem in json.loads(out)["problems"]]


# ---- on a machine with nothing


def test_without_any_framework(site: Path) -> None:
    code, out, _ = run(site)
    assert code == 1
    for words in ("torch         ", "not installed", "No supported framework is installed", "1 error"):
        assert words in out
    assert "remedy: pip install 'hyper-parallel[torch]'" in out


def test_json_without_any_framework(site: Path) -> None:
    code, out, error = run(site, "--json")
    assert (code, error) == (1, "")
    assert rules_of(out) == ["no_platform"]
    assert json.loads(out)["packages"] == dict.fromkeys(("torch", "torch_npu", "mindspore", "numpy"))


# ---- exit status


def test_a_platform_that_works(site: Path) -> None:
    install_platform(site)
    code, out, _ = run(site, "--json", "--no-collectives")
    assert (code, rules_of(out)) == (0, [])
    found = json.loads(out)
    assert found["selection"]["name"] == "fake"
    assert (found["platforms"][0]["imports"], found["checks"]) == ({"fake": None}, [])


def test_a_warning_alone_is_no_failure(site: Path) -> None:
    install_platform(site)
    install(site, "more", "1.0", "", "[hyper_parallel.platforms]\nmore = more:Platform\n")
    code, out, _ = run(site, "--json", "--no-collectives")
    assert (code, rules_of(out)) == (0, ["several_platforms"])
    assert json.loads(out)["healthy"] is True
    code, out, _ = run(site, "--json", "--no-collectives", HYPER_PARALLEL_PLATFORM="more")
    assert (code, rules_of(out)) == (0, [])


def test_an_error_is_a_failure(site: Path) -> None:
    install_platform(site)
    code, out, _ = run(site, "--json", "--no-collectives", WORLD_SIZE="2")
    assert (code, rules_of(out)) == (1, ["torch_job_incomplete"])
    assert json.loads(out)["healthy"] is False
    assert json.loads(out)["variables"] == {"WORLD_SIZE": "2"}


def test_collectives_run_unless_they_are_declined(site: Path) -> None:
    install_platform(site, "def all_reduce(device, number):\n    return 0.0")
    code, out, _ = run(site, "--json")
    assert code == 1
    assert rules_of(out) == ["check_failed", "check_wrong"]  # it has no platform that could clip
    assert [check["found"] for check in json.loads(out)["checks"]] == [[0.0, 0.0], []]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--platform", "jax"], "--platform jax: accepted: fake"),
        (["--timeout", "0"], "--timeout"),
        (["--no-such-option"], "--no-such-option"),
        (["argument"], "argument"),
    ],
)
def test_wrong_usage(site: Path, arguments: Sequence[str], words: str) -> None:
    install_platform(site)
    code, out, error = run(site, *arguments)
    assert (code, out) == (2, "")
    assert words in error


def test_only_the_named_platforms_are_examined(site: Path) -> None:
    install_platform(site)
    entry = "[hyper_parallel.diagnostics]\ntorch = no_such_module\n[hyper_parallel.platforms]\ntorch = no_such_module:P\n"
    install(site, "other", "1.0", "", entry)
    _, out, _ = run(site, "--json", "--no-collectives", "--platform", "fake")
    assert [each["name"] for each in json.loads(out)["platforms"]] == ["fake"]
    code, out, _ = run(site, "--json", "--no-collectives", "--platform", "torch")
    assert (code, rules_of(out)) == (1, ["platform_not_installed"])


def test_the_timeout_is_kept(site: Path) -> None:
    install_platform(site, framework="import time; time.sleep(100)")
    code, out, _ = run(site, "--json", "--timeout", "1.5")
    assert (code, rules_of(out)) == (1, ["framework_died"])
    assert "no answer within 1.5 s" in json.loads(out)["problems"][0]["problem"]


def test_the_command_itself_imports_no_framework(site: Path) -> None:
    install_platform(
        site, framework="import sys\nassert 'typer' not in sys.modules, 'imported by the command'"
    )
    code, out, _ = run(site, "--json", "--no-collectives")
    assert (code, rules_of(out)) == (0, [])


# ---- JSON


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(key for each in value.values() for key in keys(each))}
    return {key for each in value for key in keys(each)} if isinstance(value, list) else set()


def as_json(findings: Findings) -> dict[str, Any]:
    text = json.dumps(Diagnosis(findings, find_problems(findings)).as_json())
    return json.loads(text)


def test_the_keys_are_those_that_are_documented() -> None:
    found = as_json(replace(with_npus(variables={"RANK": "x"}), checks=checked().checks))
    assert found["format"] == 1
    assert list(found) == [
        "format", "healthy", "hyper_parallel", "python", "system", "packages", "devices", "cann", "variables",
        "selection", "platforms", "checks", "problems",
    ]  # fmt: skip
    free = {"RANK", *found["cann"]["variables"]}
    documented = doctor.__doc__ or ""
    rows = {line.split()[0] for line in documented.splitlines() if line.strip()}
    for key in keys(found) - free:
        assert f"``{key}``" in documented or key in rows, key


def test_problems_in_json() -> None:
    (problem, *_) = as_json(job(RANK="8", WORLD_SIZE="8", MASTER_ADDR="a", MASTER_PORT="1"))["problems"]
    assert (problem["rule"], problem["severity"]) == ("rank_out_of_range", "error")
    assert set(problem) == {"rule", "severity", "problem", "remedy"}


def test_each_kind_of_value_in_json() -> None:
    found = as_json(replace(HEALTHY, checks=checked().checks))
    assert found["checks"][0]["passed"] is True
    assert found["checks"][0]["found"] == [3.0, 3.0]
    assert found["platforms"][0] == {
        "name": "mindspore", "installed": False, "imports": {}, "devices": [], "error": None, "no_npu": None,
        "cann_versions": [], "has_scheduler": False,
    }  # fmt: skip
    assert found["platforms"][1]["devices"] == [{"type": "cpu", "backend": "gloo", "names": ["cpu"]}]


# ---- tables


def printed(findings: Findings) -> str:
    stream = StringIO()
    print_diagnosis(Diagnosis(findings, find_problems(findings)), Console(file=stream, width=200))
    return stream.getvalue()


def test_a_healthy_ascend_machine_in_words() -> None:
    out = printed(replace(with_npus(), checks=checked().checks))
    for words in (
        "2, driver 25.0.rc1",
        "8.5.0, environment set (/usr/local/Ascend/cann/set_env.sh)",
        "torch: yes, torch_npu: yes",
        "1 x cpu (gloo), 2 x npu (hccl)",
        "right",
        "No problem found.",
    ):
        assert words in out


def test_problems_in_words() -> None:
    findings = importing(f"{NO_HCCL}. Please run 'source set_env.sh'.", cann=INSTALLED_CANN)
    out = printed(replace(findings, checks=checked("rank 0: [red]broken").checks))
    for words in (
        "error: torch_npu needs CANN",
        "remedy: source /usr/local/Ascend/cann/set_env.sh",
        "torch: yes, torch_npu: no",
        "environment not set",
        "rank 0: [red]broken",
        "failed",
        "2 errors",
    ):
        assert words in out


def test_a_path_with_brackets_is_printed_as_it_is() -> None:
    assert "MS_WORKER_NUM=[bold]" in printed(job(MS_WORKER_NUM="[bold]"))


def test_rules_have_names_of_their_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)

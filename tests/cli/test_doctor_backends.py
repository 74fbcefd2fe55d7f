"""The doctor on the real frameworks, on the CPU; and on torch_npu and MindSpore as they fail without CANN."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hyper_parallel.cli.doctor import process_rules
from hyper_parallel.cli.doctor.examination import describe_platform, examine, exercise
from hyper_parallel.cli.doctor.findings import DeviceKind, Diagnosis
from tests.cli.doctor_sites import install
from tests.named_backends import BACKENDS

LIBRARIES = {"torch": "gloo", "mindspore": "mccl"}
TIMEOUT = 150.0
# What torch_npu does where CANN's libraries are not found: it ends the process up to 2.1, raises since then.
WITHOUT_CANN = """
try:
    raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
except ImportError as error:
    error.msg += ". Please check that the cann package is installed. Please run 'source set_env.sh'"
    {end}
"""

pytestmark = pytest.mark.timeout(400)


def rules_of(diagnosis: Diagnosis) -> list[str]:
    return [problem.rule for problem in diagnosis.problems]


@pytest.mark.parametrize("name", BACKENDS)
def test_calls_on_a_real_framework(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", name)
    said: list[str] = []
    diagnosis = examine([name], timeout=TIMEOUT, progress=said.append)
    findings = diagnosis.findings
    assert {rule.name for rule in process_rules.RULES}.isdisjoint(rules_of(diagnosis))
    assert findings.selection.name == name
    (platform,) = findings.platforms
    assert platform.imports == {name: None}
    assert DeviceKind("cpu", LIBRARIES[name], ("cpu",)) in platform.devices
    on_cpu = [check for check in findings.checks if check.device == "cpu"]
    assert [(check.call, check.ranks, check.passed) for check in on_cpu] == [
        ("all_reduce", 2, True),
        ("clip_grad_norm_", 2, True),
    ]
    assert all(
        check.expected and check.found != check.expected for check in on_cpu[1:]
    )  # measured, not copied
    assert said[:2] == [f"importing {name}", f"{LIBRARIES[name]} on {name}, cpu"]


def backend(name: str) -> None:
    if name not in BACKENDS:
        pytest.skip(f"{name} is not among the backends of this run")


def with_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **sources: tuple[str, str, str]) -> None:
    for name, (version, source, entry_points) in sources.items():
        install(tmp_path, name, version, source, entry_points)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("end", ["raise", "raise SystemExit"])
def test_torch_npu_without_cann(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend("torch")
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH"):
        monkeypatch.delenv(variable, raising=False)
    extension = (
        "9.9.9.post1",
        WITHOUT_CANN.format(end=end),
        "[torch.backends]\ntorch_npu = torch_npu:autoload\n",
    )
    with_packages(tmp_path, monkeypatch, torch_npu=extension)
    diagnosis = examine(["torch"], timeout=TIMEOUT, collectives=False)
    (platform,) = diagnosis.findings.platforms
    assert platform.imports["torch"] is None  # it is not torch that is broken
    assert str(platform.imports["torch_npu"]).startswith("ImportError: libhccl.so: cannot open shared object")
    assert {"cann_not_set", "torch_npu_version", "npu_not_seen"} <= set(rules_of(diagnosis))
    assert not {"import_failed", "cann_library"} & set(rules_of(diagnosis))


def test_a_gloo_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    backend("torch")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "tun77")
    platform = describe_platform("torch", TIMEOUT)
    reduced, clipped = exercise(platform, platform.devices[0], TIMEOUT)
    assert reduced.error is not None
    assert "Unable to find address for: tun77" in reduced.error
    assert not clipped.passed


def problems_with(
    fake: Sequence[tuple[str, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Diagnosis:
    for name, version, source in fake:
        install(tmp_path, name, version, source)
    monkeypatch.syspath_prepend(tmp_path)
    return examine(["mindspore"], timeout=TIMEOUT, collectives=False)


def test_mindspore_with_numpy_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnosis = problems_with([("numpy", "2.4.1", ""), ("mindspore", "2.10.0", "")], tmp_path, monkeypatch)
    assert "mindspore_numpy" in rules_of(diagnosis)
    assert not diagnosis.healthy


def test_mindspore_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "raise ImportError('libmindspore_core.so: no version information')"
    diagnosis = problems_with([("mindspore", "2.10.0", source)], tmp_path, monkeypatch)
    (problem,) = (each for each in diagnosis.problems if each.rule == "import_failed")
    assert (
        "mindspore is installed and cannot be imported: ImportError: libmindspore_core.so" in problem.problem
    )
    assert "mindspore==2.10.0" in problem.remedy


def test_mindspore_says_what_it_knows_of_npus() -> None:
    backend("mindspore")
    finding = describe_platform("mindspore", TIMEOUT)
    assert finding.has_scheduler
    if not any(kind.type == "npu" for kind in finding.devices):
        assert finding.no_npu is not None
        assert "ascend" in finding.no_npu
    assert "8.5" in finding.cann_versions

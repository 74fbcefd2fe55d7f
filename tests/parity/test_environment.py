"""What a report says of the machine under it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hyper_parallel.parity import environment
from hyper_parallel.parity.environment import cann_version


def test_cann_version(tmp_path: Path) -> None:
    info = tmp_path / "compiler" / "version.info"
    info.parent.mkdir()
    assert cann_version({}) is None
    assert cann_version({"ASCEND_HOME_PATH": str(tmp_path)}) == "unknown (no compiler/version.info)"
    info.write_text("Name=x\nVersion=8.5.0.RC1\nversion_dir=8.5\n")
    assert cann_version({"ASCEND_HOME_PATH": str(tmp_path)}) == "8.5.0.RC1"
    assert cann_version({"ASCEND_TOOLKIT_HOME": str(tmp_path)}) == "8.5.0.RC1"
    info.write_text("Name=x\n")
    assert cann_version({"ASCEND_HOME_PATH": str(tmp_path)}).startswith("unknown")


def test_a_device_that_cannot_be_named_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(device_type: str) -> dict[str, str]:
        raise RuntimeError(f"no name for {device_type}")

    monkeypatch.setattr(environment, "get_platform", lambda: SimpleNamespace(name="x", rank=lambda: 5))
    monkeypatch.setattr(environment, "find_local_ranks", lambda name: SimpleNamespace(describe=describe))
    facts = environment.describe_rank("npu")
    assert (facts.rank, facts.backend) == (5, "unknown")
    assert facts.device == "npu, unknown: RuntimeError('no name for npu')"
    monkeypatch.setattr(environment, "find_local_ranks", lambda name: SimpleNamespace())
    assert environment.describe_rank("npu").device == "npu"

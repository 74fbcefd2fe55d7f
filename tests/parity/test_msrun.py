"""The parity suite on msrun's ranks: real launches on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hyper_parallel.parity.cases import selected_cases
from tests.parity.launches import FAILING, failure, msrun, report, verdicts

BACKENDS = os.environ.get("HYPER_PARALLEL_TEST_BACKENDS", "torch,mindspore").split(",")
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif("mindspore" not in BACKENDS, reason="HYPER_PARALLEL_TEST_BACKENDS without mindspore"),
]
SOME = ("--select", "fsdp", "float32", "--report", "out")


def test_runs_the_cases_on_the_ranks_it_is_given(tmp_path: Path) -> None:
    done = msrun(tmp_path, 4, *SOME)
    assert done.returncode == 0, done.stdout
    document = report(tmp_path / "out")
    expected = [case.name for case in selected_cases((4,), ("fsdp", "float32"))]
    assert [case["name"] for case in document["cases"]] == expected
    assert set(verdicts(document, "mindspore").values()) == {"passed"}
    found = document["environment"]
    assert found["launcher"] == "msrun"
    assert found["platforms"]["mindspore"]["backend"] == "mccl"
    assert [each["rank"] for each in found["platforms"]["mindspore"]["ranks"]] == [0, 1, 2, 3]
    assert "passed" not in (tmp_path / "logs" / "scheduler.log").read_text()


def test_a_device_that_is_not_there_is_reported_at_once(tmp_path: Path) -> None:
    """The scheduler has to end, too: msrun waits for it, and it for the ranks."""
    done = msrun(tmp_path, 2, "--device", "cuda", *SOME)
    assert done.returncode != 0
    reasons = {case["platforms"]["mindspore"]["reason"] for case in report(tmp_path / "out")["cases"]}
    assert len(reasons) == 1
    assert "MindSpore runs on cpu and npu, not on cuda" in reasons.pop()


def test_the_report_outlives_rank_0(tmp_path: Path) -> None:
    """msrun kills every rank as soon as one has died."""
    mistakes = "fsdp+plain=wrong;tp+fsdp=die_as_rank_0"
    done = msrun(tmp_path, 2, mistakes, *SOME, program=[FAILING])
    assert done.returncode != 0
    document = report(tmp_path / "out")
    assert verdicts(document, "mindspore") == {
        "fsdp": "passed",
        "fsdp+plain": "failed",
        "fsdp on dim 1": "passed",
        "partial+fsdp": "passed",
        "tp+fsdp": "failed",
        "pipeline+fsdp": "not run",
    }
    assert "on rank 1, expected" in failure(document, "mindspore", "fsdp+plain")
    assert "rank 0 died: its connection was lost" in failure(document, "mindspore", "tp+fsdp")

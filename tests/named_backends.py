"""Which backends the tests run on. One that is named and missing fails; it is never skipped."""

from __future__ import annotations

import os

import pytest

VARIABLE = "HYPER_PARALLEL_TEST_BACKENDS"
BACKENDS = tuple(filter(None, os.environ.get(VARIABLE, "torch,mindspore").split(",")))


def needs(*backends: str) -> pytest.MarkDecorator:
    """Skip a test that is about certain backends while others are named."""
    absent = set(backends).difference(BACKENDS)
    return pytest.mark.skipif(bool(absent), reason=f"{VARIABLE} without {' and '.join(sorted(absent))}")

"""The contract suite on the platform for NPUs, with an NPU simulated; float64 is left out, as it has none."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

import hyper_parallel
from hyper_parallel.platforms import get_platform
from hyper_parallel_mindspore.platform import AscendPlatform
from tests.contract.backends import MindSporeKit
from tests.contract.test_clip_grad_norm import *  # noqa: F403
from tests.contract.test_flat_buffers import *  # noqa: F403
from tests.contract.test_other_calls import *  # noqa: F403
from tests.contract.test_parameters import *  # noqa: F403
from tests.contract.test_statistic import *  # noqa: F403
from tests.contract.test_tensor_math import *  # noqa: F403
from tests.contract.test_what_is_clipped import *  # noqa: F403
from tests.mindspore_backend.simulated_ascend import ascend


class AscendKit(MindSporeKit):
    """MindSpore on a simulated NPU."""

    dtypes = ("float16", "bfloat16", "float32")


@pytest.fixture(scope="module")
def kit(selected: None) -> Iterator[AscendKit]:
    with ascend():
        assert isinstance(get_platform(), AscendPlatform)
        yield AscendKit()


for needs_float64 in (
    "test_norms_whose_squares_leave_float32",
    "test_powers_beyond_float32_give_the_right_norm",
    "test_small_and_large_tensors_in_one_call",
    "test_the_result_has_the_promoted_dtype_and_each_gradient_keeps_its_own",
    "test_a_count_beyond_float32_stays_exact_where_there_is_float64",
):
    del globals()[needs_float64]


@pytest.mark.parametrize(("value", "expected"), [(1e20, math.inf), (1e-25, 0.0)])
def test_squares_that_leave_float32_are_lost(kit: AscendKit, value: float, expected: float) -> None:
    """A known limit, as of ``torch.nn.utils`` on accelerators; the gradients become 0, or stay."""
    parameter = kit.graded(np.full(3, value))
    assert kit.array(hyper_parallel.clip_grad_norm_(parameter, 1.0)) == expected
    assert kit.array(parameter.grad) == pytest.approx(np.full(3, 0.0 if expected else value), rel=1e-6, abs=0)


def test_mixed_dtypes_give_a_float32_norm_and_each_gradient_keeps_its_own(kit: AscendKit) -> None:
    parameters = [kit.graded(np.full(128, 1 / 64), dtype) for dtype in kit.dtypes]
    norm = hyper_parallel.clip_grad_norm_(parameters, 1e-3)
    assert kit.dtype(norm) == "float32"
    assert kit.array(norm) == pytest.approx(math.sqrt(len(kit.dtypes) * 128) / 64, rel=1e-6)
    assert [kit.dtype(parameter.grad) for parameter in parameters] == list(kit.dtypes)

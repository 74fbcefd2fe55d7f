"""Clipping in compiled graphs in one process, against the oracle and ``clip_grads``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter

import hyper_parallel
from hyper_parallel_mindspore.graph import ClipGrads
from tests.mindspore_backend.graph_ranks import FORMS, call
from tests.mindspore_backend.oracle import clipped, norm, rounded
from tests.mindspore_backend.tensors import array, tensor

pytestmark = pytest.mark.timeout(300)


SHAPES = ((4099,), (3, 4), (), (0, 3), (4096, 2), (7,))


def model(dtypes: Sequence[str]) -> tuple[list[Parameter], list[mindspore.Tensor], list[np.ndarray]]:
    """Parameters, their gradients, and the values of these."""
    values = [
        rounded(np.random.default_rng(i).standard_normal(shape), dtypes[i % len(dtypes)])
        for i, shape in enumerate(SHAPES)
    ]
    gradients = [tensor(value, dtypes[i % len(dtypes)]) for i, value in enumerate(values)]
    return [Parameter(gradient * 0) for gradient in gradients], gradients, values


@pytest.mark.parametrize(
    "dtypes", [("float32",), ("bfloat16",), ("float16",), ("float64",), ("float16", "float32")]
)
@pytest.mark.parametrize("form", FORMS)
def test_norm_and_gradients_of_one_process(form: str, dtypes: Sequence[str]) -> None:
    parameters, gradients, values = model(dtypes)
    found, total = call(ClipGrads(parameters, 0.5), gradients, form)
    expected = norm(values, 2.0)
    promoted = dtypes[0] if len(dtypes) == 1 else "float32"
    assert (str(total.dtype).lower(), total.shape) == (promoted, ())
    assert float(array(total)) == pytest.approx(float(rounded(expected, promoted)), rel=1e-6)
    for i, (gradient, original, value) in enumerate(zip(found, gradients, values, strict=True)):
        dtype = dtypes[i % len(dtypes)]
        assert str(gradient.dtype).lower() == dtype
        right = clipped(value, dtype, expected, 0.5)
        np.testing.assert_allclose(
            array(gradient), right, rtol={"bfloat16": 8e-3, "float16": 1e-3}.get(dtype, 1e-6)
        )
        np.testing.assert_array_equal(array(original), value)


@pytest.mark.parametrize("p", [0.0, 1.0, 3.0, 0.5, -1.0, math.inf, -math.inf])
def test_orders_of_one_process(p: float) -> None:
    parameters, gradients, values = model(("float32",))
    _, total = call(ClipGrads(parameters, 0.5, p), gradients, "jit")
    assert float(array(total)) == pytest.approx(norm(values, p), rel=2e-6, abs=0)


@pytest.mark.parametrize("form", FORMS)
def test_without_a_limit_the_gradients_are_bitwise_the_same(form: str) -> None:
    parameters, gradients, values = model(("float32",))
    gradients[0][5] = values[0][5] = math.inf
    for max_norm in (math.inf, tensor(math.inf)):
        found, total = call(ClipGrads(parameters, max_norm), gradients, form)
        assert float(array(total)) == math.inf
        for gradient, value in zip(found, values, strict=True):
            np.testing.assert_array_equal(array(gradient), rounded(value, "float32"))


@pytest.mark.parametrize("form", FORMS)
def test_a_limit_that_changes_between_calls(form: str) -> None:
    max_norm = Parameter(tensor(1.0), name="max_norm", requires_grad=False)
    clip = ClipGrads([Parameter(tensor([1.0, 1.0]))], max_norm)
    for limit in (1.0, 0.25, 100.0):
        max_norm.set_data(tensor(limit))
        (found,), _ = call(clip, [tensor([3.0, 4.0])], form)
        factor = min(1.0, limit / 5)
        np.testing.assert_allclose(array(found), [3.0 * factor, 4.0 * factor], rtol=1e-6)


def test_a_parameter_given_twice_counts_once_and_is_scaled_twice() -> None:
    first, other = Parameter(tensor([1.0])), Parameter(tensor([1.0]))
    gradients = [tensor([4.0]), tensor([3.0]), tensor([4.0])]
    found, total = call(ClipGrads([first, other, first], 1.0), gradients, "jit")
    assert float(array(total)) == 5.0
    assert [array(gradient)[0] for gradient in found] == pytest.approx([0.8, 0.6, 0.8], rel=1e-6)


def test_hundreds_of_gradients() -> None:
    """Loops over 200 were more than the compiler takes."""
    parameters = [Parameter(tensor([1.0])) for _ in range(250)]
    gradients = [tensor([float(number % 7)]) for number in range(250)]
    found, total = call(ClipGrads(parameters, 1.0), gradients, "jit")
    expected = norm(map(array, gradients), 2.0)
    assert float(array(total)) == pytest.approx(expected, rel=1e-6)
    assert [array(g)[0] for g in found] == pytest.approx([i % 7 / expected for i in range(250)], rel=1e-6)


@pytest.mark.parametrize(
    ("number", "value", "p"),
    [(20_000_003, 0.1, 2.0), (20_000_003, 1 / 3, 2.0), (2**23 + 1, 1.0, 0.0), (2**24 - 1, -1.0, 0.0)],
)
def test_a_large_gradient(number: int, value: float, p: float) -> None:
    gradient = mindspore.mint.ones(number) * value
    _, total = call(ClipGrads([Parameter(gradient)], math.inf, p), [gradient], "jit")
    expected = number if p == 0 else math.sqrt(number) * float(np.float32(value))
    assert float(array(total)) == pytest.approx(expected, rel=1e-6 if p else 0, abs=0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_squares_that_leave_float32_are_lost(dtype: str) -> None:
    """A known limit, as of ``torch.nn.utils`` on accelerators."""
    for value, expected in ((1e20, math.inf), (1e-25, 0.0)):
        _, total = call(ClipGrads([Parameter(tensor([1.0], dtype))], 1.0), [tensor([value], dtype)], "jit")
        assert float(array(total)) == expected


def test_a_compiled_function_refuses_other_shapes_and_takes_other_dtypes_and_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    clip = ClipGrads([Parameter(tensor([1.0, 1.0]))], 1.0)

    @mindspore.jit
    def step(grads: Sequence[mindspore.Tensor]) -> Any:
        return clip(grads)

    for dtype in ("float32", "bfloat16", "float32"):
        assert float(array(step([tensor([3.0, 4.0], dtype)])[1])) == 5.0
        with pytest.raises(ValueError, match="another shape"):
            step([tensor([3.0, 4.0, 5.0], dtype)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "wrong", [mindspore.Tensor([3], mindspore.int32), mindspore.Tensor([1j], mindspore.complex64), None]
)
def test_what_is_no_gradient_is_refused(
    form: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    parameters = [Parameter(tensor([1.0])), Parameter(tensor([1.0]))]
    with pytest.raises(TypeError, match="ClipGrads: a gradient is"):
        call(ClipGrads(parameters, 1.0), [tensor([1.0]), wrong], form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "given",
    [lambda g: [*g, g[0]], lambda g: g[:-1], lambda g: [g[1], g[0], *g[2:]]],
    ids=["more", "fewer", "swapped"],
)
def test_gradients_of_other_parameters_are_refused(
    form: str,
    given: Callable[[list[Any]], list[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # where MindSpore leaves what it could not compile
    parameters, gradients, _ = model(("float32",))
    with pytest.raises(ValueError, match="ClipGrads: "):
        call(ClipGrads(parameters, 1.0), given(gradients), form)


def test_wrong_arguments() -> None:
    parameter = Parameter(tensor([1.0]))
    for max_norm in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm must be at least 0"):
            ClipGrads([parameter], max_norm)
    with pytest.raises(ValueError, match="norm_type"):
        ClipGrads([parameter], 1.0, math.nan)
    with pytest.raises(TypeError, match="mindspore"):
        ClipGrads([np.ones(2)], 1.0)


def test_a_cell_and_a_generator_of_parameters() -> None:
    cell = mindspore.nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
    for parameters in (cell, cell.get_parameters()):
        (weight, bias), total = call(ClipGrads(parameters, 1.0), [tensor([[3.0, 0.0]]), tensor([4.0])], "jit")
        assert float(array(total)) == 5.0
        np.testing.assert_allclose(array(weight), [[0.6, 0.0]], rtol=1e-6)
        np.testing.assert_allclose(array(bias), [0.8], rtol=1e-6)


def test_the_same_as_the_functional_call() -> None:
    parameters, gradients, _ = model(("float32", "bfloat16"))
    found, total = call(ClipGrads(parameters, 0.5), gradients, "jit")
    right, expected = hyper_parallel.clip_grads(gradients, 0.5, params=parameters)
    assert float(array(total)) == pytest.approx(float(array(expected)), rel=1e-7)
    for gradient, other in zip(found, right, strict=True):
        np.testing.assert_allclose(
            array(gradient), array(other), rtol=8e-3 if gradient.dtype == mindspore.bfloat16 else 1e-6
        )

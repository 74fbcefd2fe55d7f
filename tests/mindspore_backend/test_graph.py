"""Clipping in compiled graphs, in one process and on real ranks with MCCL, against the oracle and ``clip_grads``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter

import hyper_parallel
from hyper_parallel import Partial, Replicate, Shard
from hyper_parallel.parity.cases import NORM_TYPES, Case, build_cases
from hyper_parallel.parity.checks import judge
from hyper_parallel_mindspore.graph import ClipGrads
from tests.mindspore_backend.graph_ranks import FORMS, call
from tests.mindspore_backend.oracle import clipped, norm, rounded
from tests.mindspore_backend.tensors import array, tensor

if TYPE_CHECKING:
    from tests.conftest import Pools

pytestmark = pytest.mark.timeout(300)


def reducible(case: Case) -> Case:
    """The case without the Partial gradients that a graph cannot reduce."""
    kept = [
        spec
        for spec in case.tensors
        if not any(isinstance(p, Partial) and p.reduce_op in ("max", "min") for p in spec.placements)
    ]
    return replace(case, tensors=tuple(kept))


CASES = {
    case.name: reducible(case)
    for world_size in (2, 3, 4)
    for case in build_cases(world_size)
    if ", mixed dtypes, " in case.name
    and (
        world_size == 2
        or case.parallelism in ("partial+shard", "tp+fsdp", "pipeline", "pipeline+fsdp", "experts")
    )
}
MODEL = "fsdp+plain, float32, {} ranks"


def on_ranks(pools: Pools, world_size: int, name: str, *args: object) -> list[Any]:
    target = f"tests.mindspore_backend.graph_ranks:{name}"
    return pools.get("mindspore", world_size).run(target, *args, timeout=200, label=str(args))


def check(case: Case, found: list[Any]) -> None:
    assert judge(case, found).failures == ()
    for outcomes in found:
        eager = {outcome.norm_type: outcome for outcome in outcomes if outcome.form == "functional"}
        for outcome in outcomes:
            assert outcome.norm == pytest.approx(eager[outcome.norm_type].norm, rel=1e-6, abs=0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parity_in_a_compiled_function(pools: Pools, case: Case) -> None:
    check(case, on_ranks(pools, case.world_size, "run_case", case, ("jit",), (2.0,)))


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_orders_in_all_forms(pools: Pools, world_size: int) -> None:
    name = MODEL.format(world_size)
    (case,) = [case for case in build_cases(world_size) if case.name == name]
    check(case, on_ranks(pools, world_size, "run_case", case, FORMS, NORM_TYPES))


@pytest.mark.parametrize("parallelism", ["partial+shard", "pipeline+fsdp"])
@pytest.mark.parametrize("p", [0.0, math.inf, -math.inf])
def test_other_orders_of_partial_gradients_and_stages(pools: Pools, parallelism: str, p: float) -> None:
    case = CASES[f"{parallelism}, mixed dtypes, 4 ranks"]
    check(case, on_ranks(pools, 4, "run_case", case, ("jit",), (p,)))


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("p", [2.0, math.inf, -math.inf])
def test_nan_reaches_every_rank_and_every_element(pools: Pools, p: float, placement: Any) -> None:
    for total, gradient in on_ranks(pools, 3, "nonfinite", math.nan, p, placement, "jit"):
        assert math.isnan(total)
        assert all(map(math.isnan, gradient))


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_meshes_that_finish_one_after_another(pools: Pools, p: float) -> None:
    """Rows {0, 1}, {2, 3} and columns {0, 2}, {1, 3} of no common mesh: each rank adds up its own two."""
    rows, columns = {0: [1.0, 2.0], 1: [3.0, 4.0]}, {0: [5.0, 6.0, 7.0], 1: [-8.0, 9.0, 0.5]}
    for rank, (total, clipped_here, eager) in enumerate(on_ranks(pools, 4, "two_meshes", p)):
        row, column = divmod(rank, 2)
        expected = norm([np.array(rows[row]), np.array(rows[row]) + 1, np.array(columns[column]) * 3], p)
        assert total == pytest.approx(expected, rel=1e-6)
        assert eager == pytest.approx(expected, rel=1e-6)
        np.testing.assert_allclose(
            clipped_here, (np.array(rows[row]) + column) / (expected + 1e-6), rtol=1e-6
        )


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("more", "RuntimeError", "the ranks clip different tensors"),
        ("max_norm", "ValueError", "rank 1: max_norm must be at least 0"),
        ("max", "NotImplementedError", "cannot reduce Partial gradients by max"),
    ],
)
def test_what_is_wrong_on_one_rank_is_raised_on_all(pools: Pools, what: str, kind: str, text: str) -> None:
    for found, message in on_ranks(pools, 2, "failing", what):
        assert found == kind
        assert text in message


def test_a_whole_step_in_one_graph_trains_as_its_operations_do(pools: Pools) -> None:
    compiled = on_ranks(pools, 2, "training", 3, 0.5, True)
    eager = on_ranks(pools, 2, "training", 3, 0.5, False)
    for (norms, weights), (expected, right) in zip(compiled, eager, strict=True):
        assert norms == pytest.approx(expected, rel=1e-6)
        assert norms == compiled[0][0]
        np.testing.assert_allclose(weights, right, rtol=1e-6)
        assert (weights != 1).any()


# ---- one process

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

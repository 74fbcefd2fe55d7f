"""The staged norm of a real cell, with the names of its parameters."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import mint, nn

import hyper_parallel


def test_staged_norm_of_a_cell() -> None:
    cell = nn.SequentialCell(nn.Dense(3, 2), nn.Dense(2, 1))
    parameters = cell.trainable_params()
    grads = ms.value_and_grad(lambda x: mint.sum(mint.square(cell(x))), None, parameters)(mint.ones((4, 3)))[
        1
    ]
    for parameter, gradient in zip(parameters, grads, strict=True):
        parameter.grad = gradient
    before = {p.name: p.grad.asnumpy().copy() for p in parameters}
    excluded = [parameters[0].name]
    plan = hyper_parallel.build_norm_shard_plan(cell, excluded)
    norm_sq, refs = hyper_parallel.dense_grad_norm_sq_and_refs(cell, excluded, plan)
    hyper_parallel.scale_grad_refs_(refs, 0.5)
    assert list(plan.representatives) == [name for name in before if name not in excluded]
    expected = sum(
        float((g.astype(np.float64) ** 2).sum()) for name, g in before.items() if name not in excluded
    )
    assert abs(float(norm_sq) / expected - 1) < 1e-6
    for parameter in parameters:
        factor = 1.0 if parameter.name in excluded else 0.5
        np.testing.assert_allclose(parameter.grad.asnumpy(), before[parameter.name] * factor, rtol=1e-6)

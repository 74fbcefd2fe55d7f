"""What ranks run in compiled graphs. Each function is called on every rank of a pool."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

import hyper_parallel
from hyper_parallel import Mesh, Partial, Replicate, Shard
from hyper_parallel.parity.cases import MAX_NORM, Case
from hyper_parallel.parity.oracle import local_gradient
from hyper_parallel.parity.worker import Outcome
from hyper_parallel_mindspore import graph_norm
from hyper_parallel_mindspore.graph import ClipGrads
from tests.mindspore_backend.tensors import array, rank, tensor

FORMS = ("jit", "graph mode", "eager")


def call(clip: ClipGrads, grads: Sequence[Tensor], form: str) -> tuple[Sequence[Tensor], Tensor]:
    """Call the cell in a compiled function, in graph mode, or operation by operation."""

    def clip_all(given: tuple[Tensor, ...]) -> tuple[Sequence[Tensor], Tensor]:
        return clip(given)

    if form == "jit":
        return mindspore.jit(clip_all)(tuple(grads))
    mindspore.set_context(mode=mindspore.GRAPH_MODE if form == "graph mode" else mindspore.PYNATIVE_MODE)
    try:
        return clip(tuple(grads))
    finally:
        mindspore.set_context(mode=mindspore.PYNATIVE_MODE)


def build(case: Case) -> tuple[list[int], list[Parameter], list[Tensor], Any]:
    """The tensors of the case that this rank holds: their indices, parameters and gradients; the mesh of stages."""
    meshes = {
        name: hyper_parallel.init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.dim_names)
        for mesh in case.meshes
        for name in mesh.dim_names
    }
    held = [index for index, spec in enumerate(case.tensors) if case.holds(spec, rank())]
    parameters, gradients = [], []
    for index in held:
        spec, part = case.tensors[index], local_gradient(case, index, rank())
        gradients.append(tensor(part, spec.dtype))
        parameter = Parameter(tensor(0 * part, spec.dtype), name=f"w{index}")
        if spec.mesh_dims:
            mesh = meshes[spec.mesh_dims[0]]
            where = mesh if spec.mesh_dims == mesh.mesh_dim_names else mesh[spec.mesh_dims]
            hyper_parallel.attach_layout(parameter, where, spec.placements, spec.shape)
        if spec.shared is not None:
            hyper_parallel.mark_shared(parameter, spec.shared)
        parameters.append(parameter)
    return held, parameters, gradients, meshes["pp"]["pp"] if case.has_stages else None


def run_case(case: Case, forms: Sequence[str], orders: Sequence[float]) -> list[Outcome]:
    """A parity case in graphs, and by ``clip_grads`` for each order (form ``functional``)."""
    held, parameters, gradients, pp_mesh = build(case)
    outcomes = []
    for p in orders:
        clip = ClipGrads(parameters, MAX_NORM, p, pp_mesh=pp_mesh)
        results = {form: call(clip, gradients, form) for form in forms}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            results["functional"] = hyper_parallel.clip_grads(
                gradients, MAX_NORM, p, params=parameters, pp_mesh=pp_mesh
            )
        outcomes += [outcome(case, held, form, p, result) for form, result in results.items()]
    return outcomes


def outcome(
    case: Case, held: Sequence[int], form: str, p: float, result: tuple[Sequence[Tensor], Tensor]
) -> Outcome:
    clipped, norm = result
    values: list[Any] = [None] * len(case.tensors)
    for index, gradient in zip(held, clipped, strict=True):
        values[index] = array(gradient)
    return Outcome(form, p, float(array(norm)), tuple(values))


def mesh_of_all() -> Any:
    return hyper_parallel.init_device_mesh(
        "cpu", (mint.distributed.get_world_size(),), mesh_dim_names=("dp",)
    )


def nonfinite(value: float, p: float, placement: Any, form: str) -> tuple[float, list[float]]:
    """The norm and the gradient if the last element on the last rank has this value."""
    mesh = mesh_of_all()
    parameter = hyper_parallel.attach_layout(Parameter(tensor(np.ones(3))), mesh, [placement])
    last = value if rank() == mesh.size() - 1 else 1.0
    (clipped,), norm = call(ClipGrads([parameter], 0.5, p), [tensor([1.0, 1.0, last])], form)
    return float(array(norm)), array(clipped).tolist()


def partial_terms(
    sizes: Sequence[int], reduce_ops: Sequence[str], bucket: int, p: float
) -> tuple[float, list[Any]]:
    """The norm of Partial gradients reduced in buckets of so many elements, and these gradients, unclipped."""
    shape = tuple(2 for _ in reduce_ops) if len(reduce_ops) > 1 else (mint.distributed.get_world_size(),)
    mesh = hyper_parallel.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    placements = [Partial(reduce_op) for reduce_op in reduce_ops]
    parameters = [
        hyper_parallel.attach_layout(Parameter(tensor(np.ones(size))), mesh, placements) for size in sizes
    ]
    generator = np.random.default_rng(rank())
    gradients = [tensor(generator.standard_normal(size)) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_norm, "_BUCKET_NUMEL", bucket)
        _, norm = call(ClipGrads(parameters, 1.0, p), gradients, "jit")
    return float(array(norm)), [array(gradient) for gradient in gradients]


def two_meshes(p: float) -> tuple[float, np.ndarray | None, float]:
    """A shard on a row of 2 x 2 ranks and a copy on a column, where no mesh holds both; norm, shard, eager norm."""
    row, column = divmod(rank(), 2)
    parameters = [
        hyper_parallel.attach_layout(
            Parameter(tensor(np.ones(2))), Mesh((2,), (2 * row, 2 * row + 1)), [Shard(0)], (4,)
        ),
        hyper_parallel.attach_layout(
            Parameter(tensor(np.ones(3))), Mesh((2,), (column, 2 + column)), [Replicate()]
        ),
    ]
    rows, columns = ([1.0, 2.0], [3.0, 4.0]), ([5.0, 6.0, 7.0], [-8.0, 9.0, 0.5])
    gradients = [tensor(np.array(rows[row]) + column), tensor(np.array(columns[column]) * 3)]
    (clipped, _), total = call(ClipGrads(parameters, 1.0, p), gradients, "jit")
    _, eager = hyper_parallel.clip_grads(gradients, 1.0, p, params=parameters)
    return float(array(total)), array(clipped), float(array(eager))


def failing(what: str) -> tuple[str, str]:
    """The error of building a cell when something is wrong on rank 1."""
    mesh = mesh_of_all()
    parameter = hyper_parallel.attach_layout(Parameter(tensor(np.ones(4))), mesh, [Shard(0)])
    parameters, max_norm = [parameter], 1.0
    if what == "max":
        hyper_parallel.attach_layout(parameter, mesh, [Partial("max")])
    elif rank() == 1 and what == "more":
        parameters.append(hyper_parallel.attach_layout(Parameter(tensor([1.0])), mesh, [Replicate()]))
    elif rank() == 1:
        max_norm = math.nan
    try:
        ClipGrads(parameters, max_norm)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return type(error).__name__, str(error)
    return "", ""


def training(steps: int, max_norm: float, compiled: bool) -> tuple[list[float], np.ndarray]:
    """Steps of a sharded layer, all in one graph or operation by operation; norms and this rank's weights."""
    net = nn.Dense(4, 2, weight_init="ones", bias_init="zeros")
    parameters = net.trainable_params()
    for parameter in parameters:
        hyper_parallel.attach_layout(parameter, mesh_of_all(), [Shard(0)])

    def loss(x: Tensor) -> Tensor:
        return mint.sum(mint.square(net(x)))

    loss_and_grads = mindspore.value_and_grad(loss, None, parameters)
    optimizer, clip = nn.SGD(parameters, 0.1), ClipGrads(parameters, max_norm)

    def step(x: Tensor) -> Tensor:
        _, grads = loss_and_grads(x)
        clipped, norm = clip(grads)
        optimizer(clipped)
        return norm

    def eager_step(x: Tensor) -> Tensor:
        _, grads = loss_and_grads(x)
        clipped, norm = hyper_parallel.clip_grads(grads, max_norm, params=parameters)
        optimizer(tuple(clipped))
        return norm

    taken = mindspore.jit(step) if compiled else eager_step
    x = tensor(np.random.default_rng(rank()).standard_normal((8, 4)))
    norms = [float(array(taken(x))) for _ in range(steps)]
    return norms, np.concatenate([array(parameter).reshape(-1) for parameter in parameters])

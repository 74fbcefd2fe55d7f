"""What the ranks run. Each function is called on every rank of a pool and returns what that rank saw."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

import hyper_parallel
from hyper_parallel import Partial, Replicate, Shard, StridedShard
from hyper_parallel.platforms import get_platform
from tests.mindspore_backend.oracle import Case, Spec
from tests.mindspore_backend.tensors import array, counted_collectives, rank, tensor


class Model(nn.Cell):
    """A cell of given parameters."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        for index, parameter in enumerate(parameters):
            parameter.name = f"w{index}"
            self.insert_param_to_cell(f"w{index}", parameter)


def placed(mesh: Any, case: Case, spec: Spec) -> tuple[Any, list[Any], tuple[int, ...]]:
    where = mesh if spec.mesh_dims is None else mesh[spec.mesh_dims]
    placements = [Replicate() if dim is None else Shard(dim) for dim in spec.cuts or ()]
    return where, placements, spec.values.shape


def build(case: Case, form: str) -> tuple[list[Parameter], list[Tensor | None]]:
    """Parameters of ones, and this rank's gradients; DTensors, or plain tensors with a layout."""
    mesh = hyper_parallel.init_device_mesh("cpu", case.sizes, mesh_dim_names=case.names)
    parameters, gradients = [], []
    for spec in case.specs:
        local = case.local(spec, rank())
        value, gradient = tensor(np.ones(local.shape), spec.dtype), tensor(local, spec.dtype)
        if spec.cuts is not None and form == "dtensor":
            value = hyper_parallel.DTensor.from_local(value, *placed(mesh, case, spec))
        parameter = Parameter(value)
        if spec.cuts is not None and form != "dtensor":
            hyper_parallel.attach_layout(parameter, *placed(mesh, case, spec))
        parameters.append(parameter)
        gradients.append(None if rank() in spec.missing_on else gradient)
    return parameters, gradients


def clip(case: Case, p: float, max_norm: float, form: str, steps: int = 1) -> dict[str, Any]:
    """Clip in one of the forms; ``grads`` are those of the tensors that were passed in, read afterwards."""
    parameters, gradients = build(case, form)
    originals = [None if g is None else array(g) for g in gradients]
    with warnings.catch_warnings(), counted_collectives() as calls:
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(steps):
            calls.clear()
            for gradient, original, spec in zip(gradients, originals, case.specs, strict=True):
                if gradient is not None and original.size:
                    gradient.copy_(tensor(original, spec.dtype))
            norm, results = _clip(parameters, gradients, p, max_norm, form)
    return {
        "norm": float(array(norm)),
        "bits": norm.astype(mindspore.float32).asnumpy().tobytes(),
        "dtype": str(norm.dtype).lower(),
        "shape": norm.shape,
        "grads": [array(g) for g in gradients],
        "results": [array(g) for g in results],
        "calls": list(calls),
    }


def _clip(
    parameters: list[Parameter], gradients: list[Tensor | None], p: float, max_norm: float, form: str
) -> tuple[Tensor, list[Tensor | None]]:
    if form == "functional":
        results, norm = hyper_parallel.clip_grads(gradients, max_norm, p, params=parameters)
        return norm, results
    if form == "grads":
        return hyper_parallel.clip_grad_norm_(
            Model(parameters), max_norm, p, grads=tuple(gradients)
        ), gradients
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return hyper_parallel.clip_grad_norm_(iter(parameters), max_norm, p), gradients


def clip_asynchronously(case: Case, p: float, max_norm: float, form: str) -> dict[str, Any]:
    """As ``clip``, while MindSpore queues its operations, as it does unless told otherwise."""
    mindspore.set_context(pynative_synchronize=False)
    try:
        return clip(case, p, max_norm, form, 3)
    finally:
        mindspore.set_context(pynative_synchronize=True)


def failing(case: Case, what: str, guilty: int) -> tuple[str, str, list[np.ndarray | None]]:
    """The error of a call in which one rank does something wrong, and the gradients afterwards."""
    parameters, gradients = build(case, "attached")
    options: dict[str, Any] = {}
    if what == "nonfinite":
        options["error_if_nonfinite"] = True
    if rank() == guilty:
        first = gradients[0]
        if what == "shape":
            gradients[0] = tensor(np.ones((1, 1, 3)))
        elif what == "expanded":
            gradients[0] = tensor(np.ones((1, 1))).broadcast_to(first.shape)
        elif what == "kind":
            gradients[0] = np.ones(first.shape, np.float32)
        elif what == "dtype":
            gradients[0] = Tensor(np.ones(first.shape, np.int32))
        elif what == "foreach":
            options["foreach"] = True
        elif what == "names":
            parameters.append(Parameter(tensor([1.0])))
            gradients.append(tensor([1.0]))
    try:
        hyper_parallel.clip_grad_norm_(parameters, 0.5, grads=gradients, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        held = [array(g) if isinstance(g, Tensor) else None for g in gradients]
        return type(error).__name__, str(error), held
    return "", "", []


def mesh_api() -> dict[str, Any]:
    """What a 2 x 2 mesh says on this rank."""
    mesh = hyper_parallel.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    total = tensor([float(rank())])
    mint.distributed.all_reduce(total, "sum", tp.get_group())
    return {
        "shape": mesh.shape,
        "size": (mesh.size(), mesh.size(0), mesh.size("tp"), dp.size()),
        "ndim": (mesh.ndim, dp.ndim),
        "names": (mesh.mesh_dim_names, tp.mesh_dim_names),
        "coordinate": (mesh.get_coordinate(), dp.get_coordinate()),
        "local_rank": (mesh.get_local_rank("dp"), mesh.get_local_rank(1), tp.get_local_rank()),
        "ranks": (dp.core.ranks, tp.core.ranks),
        "roots": dp.core.root == mesh.core == tp.core.root,
        "whole": mesh["dp", "tp"] == mesh,
        "hash": hash(mesh) == hash(mesh["dp", "tp"]),
        "tp sum": array(total).tolist(),
        "groups": sorted(get_platform().groups()),
    }


LAYOUTS = {
    "shard": [Shard(0), Replicate()],
    "copies": [Replicate(), Replicate()],
    "both": [Shard(0), Shard(1)],
    "same dim": [Shard(0), Shard(0)],
    "strided": [StridedShard(0, split_factor=2), Shard(0)],
}


def full_tensors(values: np.ndarray, dtype: str) -> dict[str, tuple[np.ndarray | None, tuple[int, ...]]]:
    """Distribute and assemble again."""
    mesh = hyper_parallel.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = tensor(values, dtype)
    found = {}
    for name, placements in LAYOUTS.items():
        dtensor = hyper_parallel.distribute_tensor(whole, mesh, placements)
        full = dtensor.full_tensor()
        assert full.dtype == whole.dtype
        assert full.shape == whole.shape
        found[name] = (array(full), tuple(dtensor.shape))
    return found


def partial_tensors() -> dict[str, list[float]]:
    """Terms 1 + rank and -rank, reduced by each op over the dims of a 2 x 2 mesh."""
    mesh = hyper_parallel.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    local = tensor([1.0 + rank(), -float(rank())])
    return {
        op: array(
            hyper_parallel.DTensor.from_local(local, mesh, [Partial(op), Replicate()]).full_tensor()
        ).tolist()
        for op in ("sum", "avg", "max", "min")
    }


def reduced(values: Sequence[Sequence[float]], reduce_op: str, ranks: tuple[int, ...]) -> bytes | None:
    """The bits of what the platform reduces; rank r brings ``values[r]``."""
    if rank() not in ranks:
        return None
    platform = get_platform()
    buffer = platform.all_reduce(platform.pack(values[rank()], None), reduce_op, ranks)
    return np.asarray(buffer).tobytes()


def scattered(reduce_op: str) -> tuple[int, list[float], Any]:
    """This rank's slice of a reduced buffer of 8 numbers, and a gather of ranks."""
    platform, everyone = get_platform(), tuple(range(mint.distributed.get_world_size()))
    pieces = [(tensor(np.arange(5.0) * (1 + rank())), 1, 5), (None, 0, 2)]
    buffer = platform.flatten(pieces, 8, 0.5, None)
    mine = platform.reduce_scatter(buffer, reduce_op, everyone)
    return rank(), platform.read(mine, True), platform.all_gather_object({"rank": rank()}, everyone)


def replicas_and_slices(p: float) -> float:
    """A dense parameter on dp, an expert on ep of another mesh, and one on tp alone, in one call."""
    mesh = hyper_parallel.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    experts = hyper_parallel.init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
    parameters = [
        hyper_parallel.attach_layout(Parameter(tensor(np.ones(2))), mesh["dp"], [Shard(0)], (4,)),
        hyper_parallel.attach_layout(Parameter(tensor(np.ones(1))), mesh["tp"], [Shard(0)], (2,)),
        hyper_parallel.attach_layout(Parameter(tensor(np.ones(2))), experts, [Shard(0)], (8,)),
    ]
    dp, tp = divmod(rank(), 2)
    values = (
        np.arange(4.0)[2 * dp : 2 * dp + 2],
        np.array([5.0 + tp]),
        np.arange(8.0)[2 * rank() : 2 * rank() + 2],
    )
    for parameter, value in zip(parameters, values, strict=True):
        parameter.main_grad = tensor(value)
    return float(array(hyper_parallel.clip_grad_norm_(parameters, math.inf, p)))


def partial_gradients(reduce_op: str, p: float) -> tuple[float, list[float]]:
    """A Partial gradient, [1, -3] on rank 0 and [2, 1] on rank 1, and one that is there on rank 0 only."""
    mesh = hyper_parallel.init_device_mesh("cpu", (2,))
    parameters = [
        hyper_parallel.attach_layout(Parameter(tensor([0.0, 0.0])), mesh, [Partial(reduce_op)])
        for _ in range(2)
    ]
    terms = ([1.0, -3.0], [2.0, 1.0])
    parameters[0].grad = tensor(terms[rank()])
    if rank() == 0:
        parameters[1].grad = tensor([4.0, -5.0])
    norm = hyper_parallel.clip_grad_norm_(parameters, 1.0, p)
    return float(array(norm)), array(parameters[0].grad).tolist()


def pipeline(p: float, by: str) -> float:
    """Two stages of two ranks; stage s holds [3 + s] as a copy on dp and a shard [10 s + dp] of two."""
    mesh = hyper_parallel.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, dp = divmod(rank(), 2)
    parameters = [
        hyper_parallel.attach_layout(Parameter(tensor([1.0])), mesh["dp"], [Replicate()]),
        hyper_parallel.attach_layout(Parameter(tensor([1.0])), mesh["dp"], [Shard(0)], (2,)),
    ]
    parameters[0].grad, parameters[1].grad = tensor([3.0 + stage]), tensor([10.0 * stage + dp])
    pp_mesh = mesh["pp"] if by == "mesh" else mesh.get_group("pp")
    return float(array(hyper_parallel.clip_grad_norm_(parameters, math.inf, p, pp_mesh=pp_mesh)))


def data_parallel_training(steps: int, max_norm: float) -> tuple[list[float], list[float]]:
    """A dense layer trained on this rank's half of the data, with replicated parameters; norms and weights."""
    world = mint.distributed.get_world_size()
    generator = np.random.default_rng(0)
    inputs, targets = generator.standard_normal((8, 4)), generator.standard_normal((8, 1))
    mine = slice(rank() * 8 // world, (rank() + 1) * 8 // world)
    mesh = hyper_parallel.init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    net = nn.Dense(4, 1, weight_init="ones", bias_init="zeros")
    for parameter in net.trainable_params():
        hyper_parallel.attach_layout(parameter, mesh, [Replicate()])
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    step = mindspore.value_and_grad(
        lambda x, y: ((net(x) - y) ** 2).mean(), None, list(net.trainable_params())
    )
    norms = []
    for _ in range(steps):
        _, gradients = step(tensor(inputs[mine]), tensor(targets[mine]))
        for gradient in gradients:
            mint.distributed.all_reduce(gradient)
            gradient.copy_(gradient / world)
        norms.append(float(array(hyper_parallel.clip_grad_norm_(net, max_norm, grads=gradients))))
        optimizer(gradients)
    return norms, np.concatenate([array(p).reshape(-1) for p in net.trainable_params()]).tolist()

"""The cases of ``beside_torch``: the unsharded gradients, and how each rank's parameters are built from them.

``build`` gives ``(parameters, options)``. The options go to ``hyper_parallel`` alone: they say what the tensors do not
(pipeline stages). Torch's function has none for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import Partial as TorchPartial

import hyper_parallel

Values = list[np.ndarray]
Built = tuple[list[Tensor], dict[str, Any]]

SETTLED = 15.0
"""Seconds that a rank that is done waits for the others before they count as hanging."""


@dataclass(frozen=True, slots=True)
class Case:
    """``whole`` gives the unsharded gradients, as stored; ``tolerance`` is that of the factor they are scaled by."""

    name: str
    ranks: int
    whole: Callable[[], Values]
    build: Callable[[Values], Built]
    p: float = 2.0
    tolerance: float = 1e-5

    def expected(self) -> float:
        return norm_of(self.whole(), self.p)


def norm_of(arrays: Sequence[np.ndarray], p: float) -> float:
    """In float64, a million elements at a time."""
    sums, ends = [], []
    for array in arrays:
        flat = array.reshape(-1)
        for start in range(0, flat.size, 1 << 20):
            values = np.abs(flat[start : start + (1 << 20)].astype(np.float64))
            ends.append(values.max())
            sums.append(
                float(np.count_nonzero(values) if p == 0 else 0 if math.isinf(p) else (values**p).sum())
            )
    if math.isinf(p):
        return float(np.max(ends))
    return math.fsum(sums) ** (1 / p if p else 1)


def run(name: str, function: str) -> dict[str, Any]:
    """Clip to a norm of 1 on this rank: the norm, or the error, and the factors the gradients were scaled by."""
    case = CASES[name]
    parameters, options = case.build(case.whole())
    before = [_largest(parameter) for parameter in parameters]
    failure: Exception | None = None
    found: dict[str, Any] = {}
    try:
        if function == "torch":
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, case.p)
        else:
            norm = hyper_parallel.clip_grad_norm_(parameters, 1.0, case.p, **options)
        found["norm"] = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    except Exception as error:  # noqa: BLE001 - the table says what it was
        failure = error
        found["error"] = f"{type(error).__name__}: {error}"
    if not _all_settled(f"{name}/{function}") and failure is not None:
        raise failure  # so that the pool tells it beside the ranks that hang
    after = [_largest(parameter) for parameter in parameters]
    found["factors"] = [a / b for a, b in zip(after, before, strict=True) if 0 < b < math.inf]
    return found


def _all_settled(key: str) -> bool:
    """Whether every rank has returned or raised, after some waiting."""
    store = dist.distributed_c10d._get_default_store()
    store.add(key, 1)
    deadline = time.monotonic() + SETTLED
    while store.add(key, 0) < dist.get_world_size():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _largest(parameter: Tensor) -> float:
    gradient = parameter.grad
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    return 0.0 if local is None or not local.numel() else local.abs().max().item()


# ---- building blocks


def _graded(gradient: Tensor) -> Tensor:
    parameter = torch.nn.Parameter(
        torch.zeros_like(gradient) if gradient.numel() < 1e7 else gradient.detach()
    )
    parameter.grad = gradient
    return parameter


def _plain(values: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
    return _graded(torch.from_numpy(values).to(dtype))


def _sharded(values: np.ndarray, mesh: DeviceMesh, *placements: Placement) -> Tensor:
    """A parameter and a gradient that are DTensors; placements that are not Shard keep the values."""
    shards = [p if isinstance(p, Shard) else Replicate() for p in placements]
    whole = torch.from_numpy(values)
    local = whole
    for d, placement in enumerate(shards):
        if isinstance(placement, Shard):
            pieces = local.chunk(mesh.size(d), placement.dim)
            here = mesh.get_local_rank(d)
            local = pieces[here] if here < len(pieces) else local.narrow(placement.dim, 0, 0)
    made = DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return _graded(made)


def _world(size: int, name: str = "dp") -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=(name,))


def _random(*shapes: tuple[int, ...]) -> Values:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def _as(dtype: torch.dtype, *values: np.ndarray) -> Values:
    """Rounded to a dtype."""
    return [torch.from_numpy(array).to(dtype).float().numpy() for array in values]


# ---- several meshes, plain tensors beside DTensors


def _tp(values: Values) -> Built:
    mesh = _world(2, "tp")
    return [_sharded(values[0], mesh, Shard(0)), _plain(values[1])], {}


def _tp_fsdp(values: Values) -> Built:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return [_sharded(values[0], mesh, Shard(0), Shard(1)), _sharded(values[1], mesh["dp"], Shard(0))], {}


def _experts(values: Values) -> Built:
    dense = _world(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    return [_sharded(values[0], dense, Shard(0)), _sharded(values[1], mesh["ep"], Shard(0))], {}


def _local_experts(values: Values) -> Built:
    mesh, rank = _world(4, "ep"), dist.get_rank()
    expert = _plain(values[0][rank : rank + 1].copy())
    return [hyper_parallel.attach_layout(expert, mesh, [Shard(0)]), _plain(values[1])], {}


def _pipeline(values: Values) -> Built:
    return [_plain(values[dist.get_rank()])], {"pp_mesh": _world(2, "pp")}


# ---- uneven ranks


def _shards(size: int, values: Values) -> Built:
    mesh = _world(size)
    return [_sharded(array, mesh, Shard(0)) for array in values], {}


def _missing(values: Values) -> Built:
    parameters, options = _shards(2, values)
    if dist.get_rank() == 1:
        parameters[1].grad = None
    return parameters, options


def _partial(reduce_op: str, values: Values) -> Built:
    """Rank 0 and rank 1 hold terms that reduce to the values."""
    mesh, rank = _world(2), dist.get_rank()
    terms = {"sum": (0.25, 0.75), "max": (1.0, -2.0)}[reduce_op]
    return [_sharded(array * np.float32(terms[rank]), mesh, TorchPartial(reduce_op)) for array in values], {}


# ---- one process


def _alone(values: Values, *, dtypes: tuple[torch.dtype, ...] = ()) -> Built:
    kinds = dtypes or (torch.float32,) * len(values)
    return [_plain(array, dtype) for array, dtype in zip(values, kinds, strict=True)], {}


def _beside_float32(dtype: torch.dtype, values: Values) -> Built:
    return _alone(values, dtypes=(*(dtype,) * (len(values) - 1), torch.float32))


def _spikes() -> Values:
    values = np.full(1 << 20, 2.0**-12.2, dtype=np.float32)
    values[::4096] = 1.0
    return [values]


def _nan_on_rank_1() -> Values:
    return [np.array([1.0, 2.0, np.nan, 4.0], dtype=np.float32)]


_BF16, _FP16, _ONE = torch.bfloat16, torch.float16, np.ones(1, dtype=np.float32)
_LIST = (
    Case("TP: a plain norm weight beside DTensors", 2, lambda: _random((8, 4), (4,)), _tp),
    Case("TP and FSDP: DTensors on (dp, tp) and on dp", 4, lambda: _random((8, 4), (4,)), _tp_fsdp),
    Case("experts on a mesh of their own", 4, lambda: _random((8, 4), (4, 3)), _experts),
    Case("experts as plain local tensors, beside a replicated one", 4, lambda: _random((4, 3), (5,)), _local_experts),
    Case("pipeline: [3] on stage 0, [4] on stage 1", 2, lambda: [3 * _ONE, 4 * _ONE], _pipeline),
    Case("an empty shard, p=inf", 4, lambda: _random((2, 3)), partial(_shards, 4), math.inf),
    Case("an empty shard, p=2", 4, lambda: _random((2, 3)), partial(_shards, 4)),
    Case("a gradient missing on one rank", 2, lambda: [_random((4, 2))[0], np.array([5, 0], "f")], _missing),
    Case("NaN on rank 1, p=inf", 2, _nan_on_rank_1, partial(_shards, 2), math.inf),
    Case("NaN on rank 1, p=2", 2, _nan_on_rank_1, partial(_shards, 2)),
    Case("Partial(sum)", 2, lambda: _random((5,)), partial(_partial, "sum")),
    Case("Partial(sum), p=inf", 2, lambda: _random((5,)), partial(_partial, "sum"), math.inf),
    Case("Partial(max) of positive values, p=inf", 2, lambda: [np.abs(_random((5,))[0])], partial(_partial, "max"), math.inf),
    Case("Partial(max) of positive values, p=2", 2, lambda: [np.abs(_random((5,))[0])], partial(_partial, "max")),
    Case("FSDP: uneven shards, p=3", 4, lambda: _random((7, 3), (5,)), partial(_shards, 4), 3.0),
    Case("p=0: 6 non-zeros in two tensors", 1, lambda: [np.array([1, 0, 2, 3], "f"), np.array([4, 5, 0, 6], "f")], _alone, 0.0),
    Case("1e6 float32: 1 among elements of 2e-4", 1, _spikes, _alone),
    Case("2e7 float32 in one tensor", 1, lambda: _random((20_000_000,)), _alone),
    Case("1e8 float32 in one tensor", 1, lambda: _random((100_000_000,)), _alone),
    Case("float32 of 1e20", 1, lambda: [np.full(1000, 1e20, "f")], _alone),
    Case("float32 of 1e-25", 1, lambda: [np.full(1000, 1e-25, "f")], _alone),
    Case("50 bfloat16 tensors, and a float32 one", 1, lambda: [*_as(_BF16, *_random(*[(100,)] * 50)), _ONE], partial(_beside_float32, _BF16), 2.0, 2.0**-8),
    Case("float16 with a norm above 65,504, and a float32 one", 1, lambda: [np.full(1000, 6e4, "f"), _ONE], partial(_beside_float32, _FP16), 2.0, 1e-3),
)  # fmt: skip
CASES = {case.name: case for case in _LIST}

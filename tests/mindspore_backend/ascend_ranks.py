"""What ranks run on a simulated NPU. Each function is called on every rank of a pool."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from mindspore import Parameter, mint

import hyper_parallel
from hyper_parallel import Partial, Placement, Replicate, Shard
from hyper_parallel.parity import worker
from hyper_parallel.parity.cases import MAX_NORM, Case
from hyper_parallel_mindspore.graph import ClipGrads
from tests.mindspore_backend import graph_ranks
from tests.mindspore_backend.ranks import LAYOUTS
from tests.mindspore_backend.simulated_ascend import ATLAS_910, ATLAS_A2, ascend
from tests.mindspore_backend.tensors import array, rank, tensor

Calls = list[tuple[str, str, str]]
PLACEMENTS: dict[str, Placement] = {"shard": Shard(0), "copy": Replicate(), "terms": Partial()}


def everyone() -> Any:
    return hyper_parallel.init_device_mesh(
        "Ascend", (mint.distributed.get_world_size(),), mesh_dim_names=("dp",)
    )


def run_case(case: Case) -> tuple[list[worker.Outcome], Calls]:
    """A parity case, and the collectives it took."""
    with ascend() as seen:
        return worker.run_case(case, "Ascend"), seen.calls


def run_in_a_graph(case: Case) -> list[worker.Outcome]:
    """The same in a compiled graph that was built on the NPU; its operations are the CPU's, its all-reduce is MCCL's."""
    held, parameters, gradients, pp_mesh = graph_ranks.build(case)
    with ascend():
        clip = ClipGrads(parameters, MAX_NORM, pp_mesh=pp_mesh)
    return [graph_ranks.outcome(case, held, "jit", 2.0, graph_ranks.call(clip, gradients, "jit"))]


def steps(kind: str, p: float, number: int) -> tuple[list[tuple[int, Calls]], float, np.ndarray | None]:
    """What each of several calls took, waits of the host and collectives; the last norm and gradient."""
    with ascend() as seen:
        mesh = everyone()
        parameter = hyper_parallel.attach_layout(Parameter(tensor(np.ones((2, 3)))), mesh, [PLACEMENTS[kind]])
        taken = []
        for _ in range(number):
            gradient = tensor(np.full((2, 3), 1.0 + rank()))
            seen.waits = 0
            seen.calls.clear()
            norm = hyper_parallel.clip_grad_norm_(parameter, 0.5, p, grads=[gradient])
            taken.append((seen.waits, list(seen.calls)))
        return taken, float(array(norm)), array(gradient)


def nan_on_the_last_rank(kind: str, p: float) -> float:
    """The norm when the last element on the last rank is NaN."""
    with ascend():
        mesh = everyone()
        values = np.ones(5000)
        values[-1] = math.nan if rank() == mesh.size() - 1 else 1.0
        parameter = hyper_parallel.attach_layout(Parameter(tensor(np.ones(5000))), mesh, [PLACEMENTS[kind]])
        return float(array(hyper_parallel.clip_grad_norm_(parameter, math.inf, p, grads=[tensor(values)])))


def full_tensors(values: np.ndarray, dtype: str, oldest: bool) -> list[np.ndarray | None]:
    """Distribute and assemble, on the oldest NPU or on Atlas A2."""
    with ascend(ATLAS_910 if oldest else ATLAS_A2):
        mesh = hyper_parallel.init_device_mesh("Ascend", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = tensor(values, dtype)
        return [
            array(hyper_parallel.distribute_tensor(whole, mesh, placements).full_tensor())
            for placements in LAYOUTS.values()
        ]


def clip_on_the_oldest(dtype: str) -> tuple[float, list[Any], Calls]:
    """Sharded, copied and Partial gradients of a dtype where HCCL knows neither bfloat16 nor int16."""
    with ascend(ATLAS_910) as seen:
        mesh = everyone()
        parameters = [
            hyper_parallel.attach_layout(Parameter(tensor(np.ones(4), dtype)), mesh, [placement])
            for placement in PLACEMENTS.values()
        ]
        gradients = [tensor(np.full(4, 2.0), dtype) for _ in parameters]
        norm = hyper_parallel.clip_grad_norm_(parameters, 1.0, grads=gradients)
        return float(array(norm)), [array(gradient) for gradient in gradients], seen.calls

"""What ranks run: explain a model, then clip it, and compare what was announced with what was called."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import hyper_parallel
from hyper_parallel import Partial, Replicate, Shard
from hyper_parallel.cli.explain import explain_model
from hyper_parallel.cli.explanation import progressions

Call = tuple[str, str, list[list[int]], int, int]


def build(large: int) -> tuple[list[Any], list[Any]]:
    """Sharded, replicated, plain and Partial gradients on two ranks."""
    platform = hyper_parallel.get_platform()
    mesh = hyper_parallel.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    import numpy as np

    parameters, gradients = [], []
    for placement, local, whole in (
        (Shard(0), (3, 2), (6, 2)),
        (Replicate(), (5,), (5,)),
        (None, (4,), (4,)),
        (Partial(), (large,), (large,)),
        (Partial("max"), (3,), (3,)),
    ):
        values = np.ones(local)
        parameter = platform.parameter(platform.from_numpy(values, "float32", "cpu"))
        if placement is not None:
            hyper_parallel.attach_layout(parameter, mesh, [placement], whole)
        parameters.append(parameter)
        gradients.append(platform.from_numpy(values, "float32", "cpu"))
    return parameters, gradients


def announced_and_called(large: int) -> tuple[list[Call], list[Call], dict[str, Any], str, float]:
    """Announced collectives, those of the second step, the JSON, what was printed, and the norm."""
    platform: Any = hyper_parallel.get_platform()
    parameters, gradients = build(large)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        explanation = explain_model(parameters, gradients)
    hyper_parallel.clip_grad_norm_(parameters, 1e9, grads=gradients)
    calls: list[Call] = []

    def recorded(name: str) -> Any:
        original = getattr(platform, name)

        def call(buffer: Any, reduce_op: str, ranks: tuple[int, ...]) -> Any:
            group = [list(each) for each in progressions(ranks)]
            calls.append((name, reduce_op, group, len(buffer), len(buffer) * buffer.itemsize))
            return original(buffer, reduce_op, ranks)

        return call

    try:
        for name in ("all_reduce", "reduce_scatter"):
            setattr(platform, name, recorded(name))
        norm = hyper_parallel.clip_grad_norm_(parameters, 1e9, grads=gradients)
    finally:
        for name in ("all_reduce", "reduce_scatter"):
            delattr(platform, name)
    announced = [
        (each["op"], each["reduce_op"], each["ranks"], each["elements"], each["bytes"])
        for each in explanation.as_json()["collectives"]
        for _ in range(each["repeats"])
    ]
    return announced, calls, explanation.as_json(), printed.getvalue(), float(platform.to_numpy(norm))


def explain_fsdp() -> tuple[dict[str, Any], float]:
    """The JSON of a real FSDP2 model, asked on rank 1 only, and the norm that clipping then finds."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    model(torch.ones(4, 8)).square().sum().backward()
    found = explain_model(model, show=False).as_json() if dist.get_rank() == 1 else {}
    return found, float(hyper_parallel.clip_grad_norm_(model, 1e9))

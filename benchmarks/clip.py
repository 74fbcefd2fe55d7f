"""Measures ``hyper_parallel.clip_grad_norm_`` beside ``torch.nn.utils.clip_grad_norm_`` in one run.

``python benchmarks/clip.py`` starts 4 gloo ranks of one thread each. The calls take turns, so that noise on the
machine meets both alike; what counts is the ratio of their medians, each over the slowest rank of a call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hyper_parallel
from hyper_parallel.parity.pool import RankPool

MODELS = {
    "300 FSDP2 parameters of 1K elements": (300, 1024, 25),
    "94 MB of FSDP2 parameters": (24, 1024 * 1024, 2),
}
"""Parameters, elements of each, and parameters that share an FSDP2 group."""

CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "torch": torch.nn.utils.clip_grad_norm_,
    "hyper_parallel": hyper_parallel.clip_grad_norm_,
}


class _Scales(torch.nn.Module):
    """Parameters that only take a gradient: their sum is the loss."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        self.scales = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(elements)) for _ in range(count))

    def forward(self) -> torch.Tensor:
        return sum((scale * scale).sum() for scale in self.scales)


def _model(count: int, elements: int, per_group: int) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.ModuleList(_Scales(per_group, elements) for _ in range(count // per_group))
    for group in model:
        fully_shard(group, mesh=mesh)
    sum(group() for group in model).backward()
    return model


def measure(
    count: int, elements: int, per_group: int, rounds: int, max_norm: float
) -> dict[str, list[float]]:
    """Seconds of each call on this rank; runs on every rank of the pool."""
    parameters = list(_model(count, elements, per_group).parameters())
    times: dict[str, list[float]] = {name: [] for name in CALLS}
    for _ in range(rounds + 3):
        for name, call in CALLS.items():
            dist.barrier()
            start = time.perf_counter()
            call(parameters, max_norm)
            times[name].append(time.perf_counter() - start)
    return {name: values[3:] for name, values in times.items()}


def main(
    world_size: Annotated[int, typer.Option(help="Number of gloo ranks.")] = 4,
    rounds: Annotated[int, typer.Option(help="Calls of each kind.")] = 50,
) -> None:
    """Print medians, spreads (5th to 95th percentile) and ratios."""
    table = Table(title=f"Clipping, {world_size} gloo ranks of one thread each, milliseconds")
    for column in ("model", "clips", *CALLS, "torch / hyper_parallel"):
        table.add_column(column, justify="left" if column == "model" else "right")
    with RankPool("torch", world_size) as pool:
        for label, model in MODELS.items():
            # Clipped to a norm of 1, gradients are scaled again in each round, by 1 / (1 + 1e-6).
            for clips, max_norm in (("always", 1.0), ("never", 1e9)):
                ranks = pool.run("benchmarks.clip:measure", *model, rounds, max_norm, timeout=500)
                slowest = {
                    name: [1e3 * max(call) for call in zip(*(r[name] for r in ranks), strict=True)]
                    for name in CALLS
                }
                medians = {name: statistics.median(values) for name, values in slowest.items()}
                cells = [_spread(values) for values in slowest.values()]
                table.add_row(label, clips, *cells, f"{medians['torch'] / medians['hyper_parallel']:.2f}")
    Console().print(table)


def _spread(values: list[float]) -> str:
    low, *_, high = statistics.quantiles(values, n=20)
    return f"{statistics.median(values):.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    typer.run(main)

"""Measures what ``hyper_parallel.clip_grad_norm_`` costs beside its kernels: the plan, once, and Python, in each call.

``python benchmarks/planning.py``. The plan is the first call minus a later one. The overhead per parameter is that of the
steady state minus the adapter's ``statistic`` and ``scale_`` on the same gradients, and the slope between 300 and 3,000
parameters leaves out what a call costs by itself. Times are CPU time of the calling thread, so that other processes on
the machine count less, and all calls take turns, so that what noise is left meets them alike.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as TorchShard

import hyper_parallel
from hyper_parallel import NormKind, Shard, attach_layout, get_platform
from hyper_parallel.parity.pool import RankPool

ELEMENTS = 16
Times = dict[str, list[float]]


def _graded(gradient: Tensor) -> Tensor:
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def _plain(count: int) -> list[Tensor]:
    return [_graded(torch.randn(ELEMENTS)) for _ in range(count)]


def _attached(count: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [attach_layout(parameter, mesh, [Shard(0)]) for parameter in _plain(count)]


def _dtensors(count: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [
        _graded(DTensor.from_local(torch.randn(ELEMENTS), mesh, [TorchShard(0)], run_check=False))
        for _ in range(count)
    ]


KINDS: dict[str, Callable[[int], list[Tensor]]] = {
    "plain": _plain,
    "layout attached": _attached,
    "DTensor": _dtensors,
}


def first_and_later(kind: str, count: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of the first call on new parameters, and of the median of five later ones; runs on every rank."""
    firsts, laters = [], []
    hyper_parallel.clip_grad_norm_(KINDS[kind](3), 1.0)
    for _ in range(rounds):
        parameters = KINDS[kind](count)
        gc.collect()
        times = [_seconds(lambda: hyper_parallel.clip_grad_norm_(parameters, 1e9)) for _ in range(6)]  # noqa: B023
        firsts.append(times[0])
        laters.append(statistics.median(times[1:]))
    return firsts, laters


def steady(kind: str, count: int, rounds: int, foreach: bool | None) -> Times:
    """Seconds of our call, of its kernels alone and of torch's call; runs on every rank."""
    parameters = KINDS[kind](count)
    local = [p.grad._local_tensor if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    platform, norm_kind, coefficient = get_platform(), NormKind(2), torch.tensor(0.999)

    def kernels() -> None:
        platform.statistic(local, norm_kind, foreach)
        platform.scale_(local, coefficient, foreach)

    def bare() -> None:
        torch.stack(torch._foreach_norm(local, 2)).square().sum()
        torch._foreach_mul_(local, coefficient)

    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: hyper_parallel.clip_grad_norm_(parameters, 1e-3, foreach=foreach),
        "adapter": kernels,
        "bare kernels": bare,
        "torch": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e-3, foreach=foreach),
    }
    times: Times = {name: [] for name in calls}
    for _ in range(rounds + 3):
        for name, call in calls.items():
            times[name].append(_seconds(call))
    return {name: values[3:] for name, values in times.items()}


def _seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.thread_time()
    call()
    return time.thread_time() - start


def _spread(values: list[float]) -> str:
    low, *_, high = statistics.quantiles(values, n=20)
    return f"{statistics.median(values):.2f} ({low:.2f} to {high:.2f})"


def _plan_table(pool: RankPool, rounds: int) -> Table:
    table = Table("parameters", "first call", "later calls", "plan", title="1,000 parameters, milliseconds")
    for kind in KINDS:
        ranks = pool.run("benchmarks.planning:first_and_later", kind, 1000, rounds, timeout=300)
        first, later = ([1e3 * max(t) for t in zip(*(r[i] for r in ranks), strict=True)] for i in (0, 1))
        plan = [a - b for a, b in zip(first, later, strict=True)]
        table.add_row(kind, _spread(first), _spread(later), _spread(plan))
    return table


def _steady_table(pool: RankPool, rounds: int) -> Table:
    table = Table(title="Steady state, microseconds a parameter (last columns: slope from 300 to 3,000)")
    names = ("ours", "adapter", "bare kernels", "torch")
    for column in ("parameters", "count", *names, "torch / ours", "ours - adapter", "ours - bare"):
        table.add_column(column, justify="left" if column == "parameters" else "right")
    for kind in KINDS:
        medians: dict[int, dict[str, float]] = {}
        for count in (300, 3000):
            ranks = pool.run("benchmarks.planning:steady", kind, count, rounds, None, timeout=500)
            slowest = {n: [1e6 * max(t) for t in zip(*(r[n] for r in ranks), strict=True)] for n in names}
            medians[count] = {name: statistics.median(values) for name, values in slowest.items()}
            cells = [_spread([value / count for value in values]) for values in slowest.values()]
            slope = ["", ""]
            if count == 3000:
                per = {n: (medians[3000][n] - medians[300][n]) / 2700 for n in names}
                slope = [f"{per['ours'] - per[n]:.2f}" for n in ("adapter", "bare kernels")]
            ratio = medians[count]["torch"] / medians[count]["ours"]
            table.add_row(kind, str(count), *cells, f"{ratio:.2f}", *slope)
    return table


def main(
    world_size: Annotated[int, typer.Option(help="Number of gloo ranks.")] = 1,
    rounds: Annotated[int, typer.Option(help="Calls of each kind.")] = 40,
) -> None:
    """Print medians, spreads (5th to 95th percentile), ratios and slopes."""
    with RankPool("torch", world_size) as pool:
        for table in (_plan_table(pool, max(10, rounds // 4)), _steady_table(pool, rounds)):
            Console().print(table)


if __name__ == "__main__":
    typer.run(main)

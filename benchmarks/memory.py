"""Measures how far ``hyper_parallel.clip_grad_norm_`` raises the peak memory of a process above what it held before.

``python benchmarks/memory.py`` clips 1 GB of gradients of each kind, one kind after another, and reads the kernel's
high-water mark (``VmHWM``) of each gloo rank, reset before the call. Needs Linux.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hyper_parallel
from hyper_parallel import Partial, Shard, attach_layout
from hyper_parallel.parity.pool import RankPool

ELEMENTS = 2**18
"""Elements of one parameter: 1 MB in float32."""

LIMIT = 64.0
"""MB that a call may take, whatever the size of the gradients."""


def _graded(gradient: Tensor) -> Tensor:
    # The value of the parameter is never touched: it costs no memory.
    parameter = torch.nn.Parameter(torch.empty(0).expand(0))
    parameter.data = torch.zeros(1, dtype=gradient.dtype).expand(gradient.shape)
    parameter.grad = gradient
    return parameter


def _filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, 1e-3, dtype=dtype)


def _plain(count: int) -> list[Tensor]:
    return [_graded(_filled((ELEMENTS,))) for _ in range(count)]


def _small(count: int) -> list[Tensor]:
    return [_graded(_filled((ELEMENTS // 32,))) for _ in range(32 * count)]


def _one(count: int) -> list[Tensor]:
    return [_graded(_filled((count * ELEMENTS,)))]


def _transposed(count: int) -> list[Tensor]:
    return [_graded(_filled((512, count * 512)).t())]


def _gaps(count: int) -> list[Tensor]:
    return [_graded(_filled((count * 512, 520))[:, :512])]


def _bfloat16(count: int) -> list[Tensor]:
    return [_graded(_filled((2 * count * ELEMENTS,), torch.bfloat16))]


def _partial(count: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [attach_layout(parameter, mesh, [Partial()]) for parameter in _plain(count)]


def _partial_transposed(count: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [attach_layout(parameter, mesh, [Partial()]) for parameter in _transposed(count)]


def _sharded(count: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [attach_layout(parameter, mesh, [Shard(0)]) for parameter in _plain(count)]


def _fsdp(count: int) -> list[Tensor]:
    """FSDP2 shards of ``count`` MB on each rank; the backward pass has allocated them."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    parameters: list[Tensor] = []
    for _ in range(count // 32):
        layer = torch.nn.Linear(1024, 8 * 1024 * size, bias=False)
        fully_shard(layer, mesh=mesh)
        layer(torch.ones(1, 1024)).sum().backward()
        parameters.extend(layer.parameters())
    return parameters


KINDS: dict[str, Callable[[int], list[Tensor]]] = {
    "plain, 1 MB each": _plain,
    "plain, 32 KB each": _small,
    "plain, one tensor": _one,
    "plain, one transposed tensor": _transposed,
    "plain, one view with gaps": _gaps,
    "plain bfloat16, one tensor": _bfloat16,
    "Shard(0), 1 MB each": _sharded,
    "FSDP2, 32 MB each": _fsdp,
    "Partial, 1 MB each": _partial,
    "Partial, one transposed tensor": _partial_transposed,
}


def extra(kind: str, megabytes: int, norm_types: tuple[float, ...]) -> list[float]:
    """MB by which each call raises the peak on this rank; runs on every rank of the pool."""
    parameters = KINDS[kind](megabytes)
    warm_up = [_graded(torch.ones(3))]
    hyper_parallel.clip_grad_norm_(warm_up, 1.0)
    found = []
    for p in norm_types:
        if dist.is_initialized():
            dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        hyper_parallel.clip_grad_norm_(parameters, 1e-3, p)
        found.append(_status("VmHWM") - before)
    return found


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def main(
    megabytes: Annotated[int, typer.Option(help="Size of the gradients on each rank.")] = 1024,
    world_size: Annotated[int, typer.Option(help="Number of gloo ranks.")] = 2,
    calls: Annotated[int, typer.Option(help="Calls of each norm type.")] = 3,
    only: Annotated[str, typer.Option(help="Measure the kinds whose name contains this.")] = "",
) -> None:
    """Print the extra memory of each kind: of the first call and of later ones, the largest over the ranks."""
    orders = (2.0, 1.0, float("inf"))
    table = Table(
        title=f"Extra memory of a call on {megabytes} MB of gradients a rank, {world_size} ranks, MB"
    )
    table.add_column("gradients")
    for p in orders:
        table.add_column(f"p={p:g}: first, later", justify="right")
    worst = 0.0
    for kind in filter(lambda name: only in name, KINDS):
        with RankPool("torch", world_size) as pool:
            types = tuple(p for p in orders for _ in range(calls))
            ranks = pool.run("benchmarks.memory:extra", kind, megabytes, types, timeout=500)
        peaks = [max(values) for values in zip(*ranks, strict=True)]
        cells = [peaks[start : start + calls] for start in range(0, len(peaks), calls)]
        table.add_row(kind, *(f"{first:.1f}, {max(later, default=0):.1f}" for first, *later in cells))
        worst = max(worst, *peaks)
    Console().print(table)
    Console().print(f"Largest: {worst:.1f} MB; a call may take {LIMIT:g} MB.")
    if worst > LIMIT:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

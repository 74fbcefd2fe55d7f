"""Random models of the contract suite on real ranks: built in every form that a backend knows, and clipped.

``clip_all`` runs on every rank of a pool. Only the public API is called; the models' values, and what is right for
them, come from ``rank_cases``, ``partial_cases`` and ``stage_cases``.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import hyper_parallel
from hyper_parallel import Layout, Mesh
from tests.contract.rank_cases import Case
from tests.contract.stage_cases import Pipeline

FORMS = ("grad", "main_grad", "given", "functional", "total")
"""Where gradients are: on the parameters, passed beside them, clipped out of place, or measured by themselves."""
HOLDERS = ("attached", "dtensor")
MEMORY = ("own", "flat", "transposed")


@dataclass(frozen=True)
class Job:
    """A model and one way to clip it. ``twice``: its first parameter is passed once more, at the end."""

    case: Case | Pipeline
    p: float
    max_norm: float
    form: str
    holder: str
    memory: str
    dtypes: tuple[str, str, str]
    foreach: bool | None
    twice: bool
    steps: int
    bucket: int
    checked: bool = False

    def specs(self, rank: int) -> list[Any]:
        return self.case.specs(rank) if isinstance(self.case, Pipeline) else list(self.case.specs)

    def dtype(self, spec: Any) -> str:
        """The dtype of a tensor here, in place of that which NumPy knows."""
        return dict(zip(("float32", "float64", "float16"), self.dtypes, strict=True))[spec.dtype]


@dataclass(frozen=True)
class Found:
    """What one rank has after a call, or the error it raised."""

    norm: float = 0.0
    dtype: str = ""
    gradients: tuple[np.ndarray | None, ...] = ()
    error: str = ""


def clip_all(jobs: Sequence[Job], device_type: str = "cpu") -> list[Found]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of ranks without a gradient
        return [clip(job, device_type) for job in jobs]


def clip(job: Job, device_type: str) -> Found:
    for root in sorted({layout.mesh.root or layout.mesh for layout in layouts(job)}, key=repr):
        device_mesh(root, device_type)  # a collective of all ranks, for each of them in this order
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hyper_parallel.partials.BUCKET_NUMEL", job.bucket)
        try:
            model = Model(job, device_type)
            for _ in range(job.steps):
                found = model.step()
        except Exception:  # noqa: BLE001 - the other ranks go on to the next model
            return Found(error=traceback.format_exc())
    return found


def layouts(job: Job) -> Iterable[Layout]:
    """Those of all ranks, and of the pipeline."""
    for rank in range(job.case.world_size):
        yield from (spec.layouts[rank] for spec in job.specs(rank) if spec.layouts[rank] is not None)
        if isinstance(job.case, Pipeline):
            yield Layout(job.case.pp_mesh(rank), (hyper_parallel.Replicate(),), ())


class Model:
    """The parameters of one rank, which keep their identity from step to step."""

    def __init__(self, job: Job, device_type: str) -> None:
        self.platform = hyper_parallel.get_platform()
        self.rank, self.job, self.device_type = self.platform.rank(), job, device_type
        self.specs = job.specs(self.rank)
        self.parameters = [
            self.platform.parameter(self.placed(spec, self.tensor(0 * spec.local(self.rank), spec)))
            for spec in self.specs
        ]
        pipeline = job.case if isinstance(job.case, Pipeline) else None
        for spec, parameter in zip(self.specs, self.parameters, strict=True):
            self.attach(spec, parameter)
        self.arguments: dict[str, Any] = {}
        if pipeline is not None:
            self.arguments = {"pp_mesh": device_mesh(pipeline.pp_mesh(self.rank), device_type)}
            for (key, _), parameter in zip(
                pipeline.stages[pipeline.stage(self.rank)], self.parameters, strict=True
            ):
                if key is not None:
                    hyper_parallel.mark_shared(parameter, key)

    def tensor(self, values: np.ndarray, spec: Any) -> Any:
        return self.platform.from_numpy(np.array(values), self.job.dtype(spec), self.device_type)

    def placed(self, spec: Any, local: Any) -> Any:
        layout = spec.layouts[self.rank]
        if layout is None or self.attaches(layout):
            return local
        mesh = device_mesh(layout.mesh, self.device_type)
        return hyper_parallel.DTensor.from_local(local, mesh, layout.placements, layout.global_shape)

    def attach(self, spec: Any, tensor: Any) -> None:
        layout = spec.layouts[self.rank]
        if layout is not None and self.attaches(layout):
            mesh = device_mesh(layout.mesh, self.device_type)
            hyper_parallel.attach_layout(tensor, mesh, layout.placements, layout.global_shape)

    def attaches(self, layout: Layout) -> bool:
        """Whether the tensor is no DTensor; torch's refuse several reduce ops on one tensor."""
        reduce_ops = {getattr(placement, "reduce_op", None) for placement in layout.placements}
        return self.job.holder == "attached" or len(reduce_ops - {None}) > 1

    def gradients(self) -> list[Any]:
        """New ones, placed as the parameters are."""
        there = [spec for spec in self.specs if spec.present[self.rank]]
        local = iter(arranged([self.tensor(spec.local(self.rank), spec) for spec in there], self.job.memory))
        return [self.placed(spec, next(local)) if spec.present[self.rank] else None for spec in self.specs]

    def step(self) -> Found:
        job, gradients, parameters = self.job, self.gradients(), list(self.parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if job.form in ("grad", "main_grad"):
                setattr(parameter, job.form, gradient)
        given, again = list(gradients), slice(0, int(job.twice))
        parameters, given = [*parameters, *parameters[again]], [*given, *given[again]]
        options = dict(norm_type=job.p, foreach=job.foreach, **self.arguments)
        if job.form == "total":
            for spec, gradient in zip(self.specs, gradients, strict=True):
                if gradient is not None:
                    self.attach(spec, gradient)
            norm = hyper_parallel.get_total_norm([g for g in given if g is not None], **options)
        elif job.form == "functional":
            before = self.values(gradients)
            clipped, norm = hyper_parallel.clip_grads(given, job.max_norm, params=parameters, **options)
            for old, new in zip(before, self.values(gradients), strict=True):
                np.testing.assert_array_equal(old, new, "an original was changed")
            gradients = clipped[: len(gradients)]
        else:
            more = {"grads": given} if job.form == "given" else {}
            norm = hyper_parallel.clip_grad_norm_(
                parameters, job.max_norm, check_replicas=job.checked, **more, **options
            )
        dtype = str(norm.dtype).lower().rpartition(".")[2]
        return Found(float(self.platform.to_numpy(norm)), dtype, tuple(self.values(gradients)))

    def values(self, gradients: Sequence[Any]) -> list[np.ndarray | None]:
        return [
            None if gradient is None else self.platform.to_numpy(gradient).copy() for gradient in gradients
        ]


@cache
def device_mesh(mesh: Mesh, device_type: str) -> Any:
    """The mesh as the backend knows it, a slice as a slice of its root; torch slices by names alone."""
    if hyper_parallel.get_platform().name != "torch":
        return mesh
    from torch.distributed.device_mesh import DeviceMesh

    if mesh.root is None:
        names = tuple("xyz"[: mesh.ndim])
        return DeviceMesh(device_type, np.reshape(mesh.ranks, mesh.shape).tolist(), mesh_dim_names=names)
    rank = mesh.ranks[0]
    dims = next(
        dims
        for dims in combinations(range(mesh.root.ndim), mesh.ndim)
        if mesh.root.slice_ranks(rank, dims) == mesh.ranks
        and tuple(mesh.root.shape[d] for d in dims) == mesh.shape
    )
    return device_mesh(mesh.root, device_type)[tuple("xyz"[d] for d in dims)]


def arranged(tensors: list[Any], memory: str) -> list[Any]:
    """The same tensors one after another in one piece of memory, or with reversed strides; on torch."""
    if hyper_parallel.get_platform().name != "torch" or memory == "own":
        return tensors
    import torch

    if memory == "transposed":
        orders = [tuple(reversed(range(tensor.ndim))) for tensor in tensors]
        return [
            t.permute(order).contiguous().permute(order) for t, order in zip(tensors, orders, strict=True)
        ]
    views = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        pieces = torch.cat([tensor.reshape(-1) for tensor in same]).split([t.numel() for t in same])
        views |= {id(t): piece.view(t.shape) for t, piece in zip(same, pieces, strict=True)}
    return [views[id(tensor)] for tensor in tensors]

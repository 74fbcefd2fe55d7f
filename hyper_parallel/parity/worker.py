"""What one rank does for a case: build the tensors, clip, and hand back what it finds. Only the public API is used."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import hyper_parallel
from hyper_parallel.parity.cases import MAX_NORM, NORM_TYPES, Case, Mesh
from hyper_parallel.parity.oracle import Array, local_gradient

FORMS = ("dtensor", "attached", "functional")
"""How tensors say where they lie: DTensors that carry ``grad``; plain tensors with an attached layout and
gradients passed beside them, clipped in place; and the same clipped out of place."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank saw of one call: the norm, and its local gradients after clipping (None: missing)."""

    form: str
    norm_type: float
    norm: float
    gradients: tuple[Array | None, ...]


def run_case(case: Case, device_type: str) -> list[Outcome]:
    """All norm types in the first form, the 2-norm in the others."""
    calls = [(FORMS[0], p) for p in NORM_TYPES] + [(form, 2.0) for form in FORMS[1:]]
    meshes = {
        name: mesh
        for mesh, names in ((_device_mesh(device_type, mesh), mesh.dim_names) for mesh in case.meshes)
        for name in names
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a rank without gradients is among the cases
        return [_call(case, meshes, device_type, form, p) for form, p in calls]


@cache  # the groups of a mesh take memory on the device, hundreds of MB with HCCL
def _device_mesh(device_type: str, mesh: Mesh) -> Any:
    return hyper_parallel.init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.dim_names)


def roll_call(number: int, world_size: int) -> bool:
    """Whether the ranks are in step: all of them are in this call, the ``number``-th, and reduce each other's value.

    A collective that an earlier error has left behind would be taken for one of these, and give another result.
    """
    platform = hyper_parallel.get_platform()
    ranks = tuple(range(world_size))
    called = platform.all_gather_object((platform.rank(), number), ranks)
    reduced = platform.all_reduce(platform.pack([float(number)], None), "sum", ranks)
    return called == [(rank, number) for rank in ranks] and platform.read(reduced, True) == [
        float(number * world_size)
    ]


def _call(case: Case, meshes: Mapping[str, Any], device_type: str, form: str, p: float) -> Outcome:
    platform = hyper_parallel.get_platform()
    held = [index for index, tensor in enumerate(case.tensors) if case.holds(tensor, platform.rank())]
    built = [_build(case, index, meshes, device_type, form) for index in held]
    parameters, gradients = [parameter for parameter, _ in built], [gradient for _, gradient in built]
    pp_mesh = _sliced(meshes, ("pp",)) if case.has_stages else None
    if form == "dtensor":
        for parameter, gradient in built:
            parameter.grad = gradient
        norm = hyper_parallel.clip_grad_norm_(parameters, MAX_NORM, p, pp_mesh=pp_mesh)
    elif form == "attached":
        norm = hyper_parallel.clip_grad_norm_(parameters, MAX_NORM, p, grads=gradients, pp_mesh=pp_mesh)
    else:
        gradients, norm = hyper_parallel.clip_grads(
            gradients, MAX_NORM, p, params=parameters, pp_mesh=pp_mesh
        )
    values: list[Array | None] = [None] * len(case.tensors)
    for index, gradient in zip(held, gradients, strict=True):
        values[index] = None if gradient is None else platform.to_numpy(gradient)
    return Outcome(form, p, float(platform.to_numpy(norm)), tuple(values))


def _build(case: Case, index: int, meshes: Mapping[str, Any], device_type: str, form: str) -> tuple[Any, Any]:
    """A parameter of zeros and this rank's gradient of it."""
    platform = hyper_parallel.get_platform()
    tensor, rank = case.tensors[index], platform.rank()
    part = local_gradient(case, index, rank)
    gradient = platform.from_numpy(part, tensor.dtype, device_type)
    parameter = platform.from_numpy(0 * part, tensor.dtype, device_type)
    where = (_sliced(meshes, tensor.mesh_dims), tensor.placements, tensor.shape) if tensor.mesh_dims else None
    if where is not None and form == "dtensor":
        gradient = hyper_parallel.DTensor.from_local(gradient, *where)
        parameter = hyper_parallel.DTensor.from_local(parameter, *where)
    parameter = platform.parameter(parameter)
    if where is not None and form != "dtensor":
        hyper_parallel.attach_layout(parameter, *where)
    if tensor.shared is not None:
        hyper_parallel.mark_shared(parameter, tensor.shared)
    return parameter, None if rank in tensor.missing_on else gradient


def _sliced(meshes: Mapping[str, Any], mesh_dims: tuple[str, ...]) -> Any:
    mesh = meshes[mesh_dims[0]]
    return mesh if mesh_dims == tuple(mesh.mesh_dim_names) else mesh[mesh_dims]

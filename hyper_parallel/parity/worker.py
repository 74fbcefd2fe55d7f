"""What one rank does for a case: build the tensors, clip, and hand back what it finds. Only the public API is used."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import hyper_parallel
from hyper_parallel.parity.cases import MAX_NORM, NORM_TYPES, Case
from hyper_parallel.parity.oracle import Array, global_gradients, local_indices, local_part

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
    mesh = hyper_parallel.init_device_mesh(device_type, case.mesh_shape, mesh_dim_names=case.mesh_dim_names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a rank without gradients is among the cases
        return [_call(case, mesh, device_type, form, p) for form, p in calls]


def _call(case: Case, mesh: Any, device_type: str, form: str, p: float) -> Outcome:
    platform = hyper_parallel.get_platform()
    parameters, gradients = _build(case, mesh, device_type, form)
    if form == "dtensor":
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        norm = hyper_parallel.clip_grad_norm_(parameters, MAX_NORM, p)
    elif form == "attached":
        norm = hyper_parallel.clip_grad_norm_(parameters, MAX_NORM, p, grads=gradients)
    else:
        gradients, norm = hyper_parallel.clip_grads(gradients, MAX_NORM, p, params=parameters)
    values = tuple(None if gradient is None else platform.to_numpy(gradient) for gradient in gradients)
    return Outcome(form, p, float(platform.to_numpy(norm)), values)


def _build(case: Case, mesh: Any, device_type: str, form: str) -> tuple[list[Any], list[Any]]:
    """Parameters of zeros and this rank's gradients."""
    platform = hyper_parallel.get_platform()
    rank = platform.rank()
    parameters, gradients = [], []
    for tensor, whole in zip(case.tensors, global_gradients(case), strict=True):
        part = local_part(whole, local_indices(case, tensor, rank))
        gradient = platform.from_numpy(part, tensor.dtype, device_type)
        parameter = platform.from_numpy(0 * part, tensor.dtype, device_type)
        if tensor.mesh_dims and form == "dtensor":
            where = (_sliced(mesh, case, tensor.mesh_dims), tensor.placements, tensor.shape)
            gradient = hyper_parallel.DTensor.from_local(gradient, *where)
            parameter = hyper_parallel.DTensor.from_local(parameter, *where)
        parameter = platform.parameter(parameter)
        if tensor.mesh_dims and form != "dtensor":
            where = (_sliced(mesh, case, tensor.mesh_dims), tensor.placements, tensor.shape)
            hyper_parallel.attach_layout(parameter, *where)
        parameters.append(parameter)
        gradients.append(None if rank in tensor.missing_on else gradient)
    return parameters, gradients


def _sliced(mesh: Any, case: Case, mesh_dims: tuple[str, ...]) -> Any:
    return mesh if mesh_dims == case.mesh_dim_names else mesh[mesh_dims]

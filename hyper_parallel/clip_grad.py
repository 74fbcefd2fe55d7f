"""Total norm and clipping, with the names and semantics of ``torch.nn.utils``, on any mix of parallelism."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hyper_parallel.core.norm import EPS, NormKind
from hyper_parallel.diagnosis import raise_nonfinite, replica_errors
from hyper_parallel.execution import Request, total_norm
from hyper_parallel.interface import Scalar, Tensor
from hyper_parallel.platforms import get_platform
from hyper_parallel.preparation import Prepared, bounded, prepare


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    grads: Iterable[Tensor | None] | None = None,
    pp_mesh: Any = None,
    check_replicas: bool = False,
) -> Tensor:
    """Scale gradients in place so that the norm of all of them together is at most ``max_norm``.

    The gradients are multiplied by ``min(1, max_norm / (total_norm + 1e-6))``, computed in float32 from the
    unrounded norm (the formula of ``torch.nn.utils.clip_grad_norm_``). The norm is that of the global gradients:
    each element counts once, however it is sharded or copied. Parameters without a gradient on some or all ranks
    and frozen parameters are fine.

    Args:
        parameters: a module or cell, a tensor, or an iterable of tensors (read once), in the same order on every
            rank. DTensors and tensors with an attached layout may lie on several meshes; a tensor without a layout
            is taken as replicated over the ranks involved, and without any layout nothing is communicated.
        max_norm: at least 0; ``inf`` only measures and leaves the gradients bitwise untouched.
        norm_type: any real number (0 counts non-zeros), ``inf`` or ``-inf``.
        error_if_nonfinite: raise if the norm is NaN or infinite. On an accelerator this waits for the device.
        foreach: use foreach kernels: None where there are any, True always, False never.
        grads: the gradients, in the order of ``parameters``, for frameworks that return them from a function.
            Without it, a parameter's ``main_grad``, else its ``grad``.
        pp_mesh: the device mesh (or torch process group) of the pipeline stages, of which each rank has other
            parameters, or none. As a slice of the mesh of all ranks it costs no further all-reduce.
        check_replicas: raise if copies of a gradient differ between ranks; reads all replicated gradients on the
            host and costs one more all-reduce.

    Returns:
        The norm before clipping: a 0-d tensor on the gradients' device, in their promoted dtype (float32 on a
        rank without gradients), with the same bits on every rank.

    Raises:
        ValueError: ``max_norm`` is negative or NaN, ``norm_type`` is NaN, a local tensor does not fit its layout.
        TypeError: ``parameters`` holds something other than tensors.
        RuntimeError: the norm is non-finite and ``error_if_nonfinite`` is set; ``foreach=True`` without foreach
            kernels; the ranks pass different tensors.
        All of them before any gradient has changed, and what one rank finds in its tensors is raised on all ranks.

    Collectives:
        One all-reduce of about 100 numbers over the ranks involved, and 48 more for each of several pipeline stages;
        one per mesh dim where no process group spans these; two more when only some copies of a tensor have a
        gradient. Partial gradients cost one more, and per set of mesh dims one of flags per mesh dim and a
        reduce-scatter per mesh dim and 16 MB bucket (on the CPU an all-reduce).

    On an accelerator the host waits for the result if tensors are replicated or Partial, or if ``pp_mesh`` is given.
    Otherwise it looks at what ranks report in the first call alone: an error in a later one is raised on its own
    rank, and the others find a NaN norm.
    """
    max_norm = float(max_norm)
    prepared = bounded(prepare(parameters, grads, pp_mesh), max_norm)
    norm = _measure(prepared, norm_type, error_if_nonfinite, foreach, check_replicas)
    _clip(prepared, max_norm, norm, foreach)
    return _rounded(prepared, norm)


def get_total_norm(
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    pp_mesh: Any = None,
) -> Tensor:
    """The norm of ``tensors`` (gradients: DTensors, tensors with a layout, plain tensors) taken together.

    Arguments, result, errors and collectives are those of ``clip_grad_norm_``.
    """
    tensors, _ = get_platform().parameters(tensors)
    prepared = prepare(tensors, tensors, pp_mesh)
    return _rounded(prepared, _measure(prepared, norm_type, error_if_nonfinite, foreach))


def clip_grads_with_norm_(
    parameters: Any,
    max_norm: float,
    total_norm: Tensor | float,
    foreach: bool | None = None,
    *,
    grads: Iterable[Tensor | None] | None = None,
) -> None:
    """Scale gradients in place by ``min(1, max_norm / (total_norm + 1e-6))``; nothing is communicated.

    Arguments and errors are those of ``clip_grad_norm_``; ``total_norm`` is a number or a 0-d tensor.
    """
    max_norm = float(max_norm)
    _clip(_sound(bounded(prepare(parameters, grads), max_norm)), max_norm, total_norm, foreach)


def clip_grad_value_(
    parameters: Any,
    clip_value: float,
    foreach: bool | None = None,
    *,
    grads: Iterable[Tensor | None] | None = None,
) -> None:
    """Clamp each gradient element in place to between ``-clip_value`` and ``clip_value``; nothing is communicated.

    Raises:
        ValueError: ``clip_value`` is negative or NaN, or a gradient is Partial: its elements are not known before
            the terms on all ranks are reduced.
        TypeError: ``parameters`` holds something other than tensors.
        RuntimeError: ``foreach=True`` without foreach kernels.
    """
    clip_value = float(clip_value)
    if not clip_value >= 0:
        raise ValueError(f"clip_value must be at least 0, got {clip_value}")
    prepared = _sound(prepare(parameters, grads))
    for part in prepared.plan.parts:
        for meta in part.tensors:
            if meta.layout is not None and meta.layout.partial_dims:
                raise ValueError(
                    f"{meta.name} is {meta.layout.placements}: reduce a Partial gradient before "
                    "clipping its values"
                )
    if prepared.present:
        prepared.platform.clamp_(prepared.present, clip_value, foreach)


def clip_grads(
    grads: Iterable[Tensor | None],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    params: Any = None,
    pp_mesh: Any = None,
) -> tuple[list[Tensor | None], Tensor]:
    """Like ``clip_grad_norm_``, out of place: ``(clipped gradients, total norm)``; ``grads`` stay as they are.

    Args:
        grads: the gradients, None where there is none; or a single one.
        max_norm, norm_type, error_if_nonfinite, foreach, pp_mesh: as for ``clip_grad_norm_``.
        params: the parameters, in the same order, if they carry the layouts; else ``grads`` must.

    Returns:
        The clipped gradients, in order and with the dtypes of ``grads``, and the norm before clipping. Where
        nothing is to be scaled and the host knows it, the same tensors are returned.
    """
    max_norm = float(max_norm)
    grads = [grads] if hasattr(grads, "dtype") else list(grads)
    present = [gradient for gradient in grads if gradient is not None]
    prepared = prepare(present, present, pp_mesh) if params is None else prepare(params, grads, pp_mesh)
    norm = _measure(bounded(prepared, max_norm), norm_type, error_if_nonfinite, foreach)
    coefficient = _coefficient(prepared, max_norm, norm)
    clipped = iter(present if coefficient is None else prepared.platform.scaled(present, coefficient))
    return [None if gradient is None else next(clipped) for gradient in grads], _rounded(prepared, norm)


def _sound(prepared: Prepared) -> Prepared:
    """Raise what is wrong on this rank, for calls that no other rank waits for."""
    if prepared.errors:
        raise prepared.errors[0]
    prepared.platform.check_in_place(prepared.present)
    return prepared


def _measure(
    prepared: Prepared,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    check_replicas: bool = False,
) -> Scalar:
    """The norm in the platform's widest float."""
    platform, plan, kind = prepared.platform, prepared.plan, NormKind(norm_type)
    request = Request(
        platform, kind, prepared.gradients, prepared.anchor, foreach, prepared.errors, prepared.first_use
    )
    norm = total_norm(plan, request)
    # After the norm, as its exchange has shown that the ranks hold the same tensors. Where several exchanges make
    # it, not all ranks see an error, so all go around again to be told.
    if check_replicas and ((errors := replica_errors(plan, request)) or not plan.alike):
        total_norm(plan, replace(request, errors=errors))
    if error_if_nonfinite:
        value = platform.read(norm, True)
        if value is None or not math.isfinite(value[0]):
            raise_nonfinite(plan, request)
    return norm


def _rounded(prepared: Prepared, norm: Scalar) -> Tensor:
    platform, present = prepared.platform, prepared.present
    if prepared.gradients and not present:
        warnings.warn(
            "no tensor carries a gradient on this rank; the norm is returned as float32", stacklevel=3
        )
    dtype = platform.promoted_dtype(present) if present else None
    return platform.cast(norm, dtype, present[0] if present else prepared.anchor)


def _clip(prepared: Prepared, max_norm: float, norm: Scalar | float, foreach: bool | None) -> None:
    coefficient = _coefficient(prepared, max_norm, norm)
    if coefficient is not None:
        prepared.platform.scale_(prepared.present, coefficient, foreach)


def _coefficient(prepared: Prepared, max_norm: float, norm: Scalar | float) -> Tensor | None:
    """A 0-d float32 tensor, or None if there is nothing to scale or it is 1, as far as the host knows without waiting.

    It is computed in float32, and for float64 gradients in float64, as ``torch.nn.utils`` does.
    """
    platform, present = prepared.platform, prepared.present
    if max_norm == math.inf or not present:
        return None
    least = platform.cast(1.0, None, present[0])
    ratio = max_norm / (platform.cast(norm, platform.promoted_dtype([*present, least]), present[0]) + EPS)
    limited = platform.where(ratio > 1, 1.0, ratio)  # not a clamp: some frameworks' clamp(nan) is the bound
    coefficient = platform.cast(limited, None, present[0])
    return None if platform.read(coefficient, False) == [1.0] else coefficient

"""Clipping inside a compiled graph: a cell that is planned once and has nothing but operations in it.

``hyper_parallel.clip_grads`` plans in Python as it is called, which ``mindspore.jit`` cannot compile. Where the layouts
stay as they are, all that depends on them can be settled before: which groups, which weights, which slices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore
from mindspore import Tensor, mint, nn, ops

from hyper_parallel import sharing
from hyper_parallel.core.norm import EPS, NormKind
from hyper_parallel.core.plan import ReductionPlan
from hyper_parallel.execution import Request, total_norm
from hyper_parallel.platforms import get_platform
from hyper_parallel.preparation import bounded, prepare
from hyper_parallel_mindspore.graph_norm import TotalNorm

_DTYPES = (mindspore.float32, mindspore.float16, mindspore.bfloat16, mindspore.float64)


class ClipGrads(nn.Cell):
    """``hyper_parallel.clip_grads`` for a graph: ``clipped, total_norm = ClipGrads(params, 1.0)(grads)``.

        clip = ClipGrads(net.trainable_params(), max_norm=1.0)

        @mindspore.jit
        def step(x):
            loss, grads = loss_and_grads(x)
            clipped, total_norm = clip(grads)
            return loss, total_norm, optimizer(clipped)

    Build it after the layouts are attached, on every rank; it works in a ``jit`` function, in graph mode and outside of
    both. Later changes of a layout are not seen.

    Args:
        params: as for ``hyper_parallel.clip_grad_norm_``; each is to have a gradient in every call.
        max_norm: at least 0; ``inf`` only measures. A 0-d tensor is not checked; as a ``Parameter`` it can be changed
            between calls (with ``requires_grad=False``, as a cell around this one has it among its own).
        norm_type: any real number (0 counts non-zeros), ``inf`` or ``-inf``.
        pp_mesh: the mesh of the pipeline stages.

    Inputs:
        grads: a tuple or list of tensors in the order of ``params``, of their shapes and of any float dtypes.

    Outputs:
        The clipped gradients, a tuple of new tensors of the same dtypes (for ``max_norm=inf`` the same tensors), and the
        norm before clipping: a 0-d tensor of the gradients' promoted dtype, with the same bits on every rank.

    Raises:
        ValueError, TypeError, NotImplementedError, RuntimeError: when it is built, on all ranks that communicate: what
            ``clip_grad_norm_`` raises for these parameters, and ``Partial("max")`` or ``Partial("min")``, which a graph
            cannot reduce. When it is compiled, on this rank alone, ValueError and TypeError if the gradients are not
            those of ``params``, or of no float dtype.

    Collectives:
        When it is built, those of one ``clip_grad_norm_`` without gradients. In a call one all-reduce of a number per
        rank over the ranks involved, or one per mesh dim where no process group spans these; Partial gradients cost
        one per set of mesh dims, mesh dim and bucket of 64 MB, in which they travel as float32.

    Statistics are float32: a norm of gradients whose squares leave float32 is inf or 0, and counts above 2**24 are
    rounded. 256 MB of gradients took 0.13 GB of memory to measure on the CPU, and 0.9 to 1 GB where they are Partial.
    On Ascend this was not run.
    """

    def __init__(
        self, params: Any, max_norm: float | Tensor, norm_type: float = 2.0, *, pp_mesh: Any = None
    ) -> None:
        super().__init__(auto_prefix=False)
        kind = NormKind(norm_type)
        platform = get_platform()
        parameters, names = platform.parameters(params)
        plan = _agreed_plan(parameters, names, max_norm, kind, pp_mesh)
        # The plan has each parameter once.
        places = {id(parameter): place for place, parameter in reversed(list(enumerate(parameters)))}
        self.shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        stages, _ = sharing.known_stages(plan) or ({}, 0)
        self.norm = TotalNorm(plan, kind, sorted(places.values()), list(map(math.prod, self.shapes)), stages)
        self.map = ops.Map()
        self.is_fixed = not isinstance(max_norm, Tensor)
        self.max_norm: Any = float(max_norm) if self.is_fixed else max_norm
        self.only_measures = self.is_fixed and math.isinf(self.max_norm)

    def construct(self, grads: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
        if len(grads) != len(self.shapes):
            raise ValueError("ClipGrads: pass one gradient for each of the parameters")
        grads = tuple(grads)
        if self.map(_shape, grads) != self.shapes:
            raise ValueError("ClipGrads: a gradient has another shape than its parameter")
        norm, dtype = self.norm(grads), _promoted(self.map(_float_dtype, grads))
        if not self.only_measures:
            grads = self.map(ops.partial(_product, self._coefficient(norm)), grads)
        return grads, norm.astype(dtype)

    def _coefficient(self, norm: Tensor) -> Tensor:
        if self.is_fixed:
            ratio = self.max_norm / (norm + EPS)
            return mint.where(ratio > 1.0, 1.0, ratio)  # not a clamp, of which NaN comes out as the bound
        bound = self.max_norm.reshape(()).astype(mindspore.float32)
        ratio = bound / (norm + EPS)
        return mint.where(mint.logical_or(ratio > 1.0, mint.isinf(bound)), 1.0, ratio)


def _agreed_plan(
    parameters: Sequence[Tensor],
    names: Sequence[str],
    max_norm: float | Tensor,
    kind: NormKind,
    pp_mesh: Any,
) -> ReductionPlan:
    """Plan, and let all ranks find out together whether anything is wrong: a call in which no rank has a gradient."""
    prepared = prepare(parameters, [None] * len(parameters), pp_mesh, names or None)
    if not isinstance(max_norm, Tensor):
        prepared = bounded(prepared, float(max_norm))
    errors = list(prepared.errors)
    reduce_ops = {
        reduce_op
        for part in prepared.plan.parts
        for reduction in part.reductions
        for _, reduce_op in reduction.chain
    }
    if not reduce_ops <= {"sum", "avg"}:
        beyond = sorted(reduce_ops - {"sum", "avg"})
        errors.append(
            NotImplementedError(
                f"a graph cannot reduce Partial gradients by {', '.join(beyond)}; "
                "use hyper_parallel.clip_grads outside of the graph"
            )
        )
    request = Request(
        prepared.platform,
        kind,
        [None] * len(prepared.gradients),
        prepared.anchor,
        errors=tuple(errors),
        first_use=True,
    )
    total_norm(prepared.plan, request)
    return prepared.plan


def _shape(gradient: Tensor) -> tuple[int, ...]:
    if gradient is None:
        raise TypeError("ClipGrads: a gradient is missing, and a graph needs them all")
    return gradient.shape


def _float_dtype(gradient: Tensor) -> Any:
    if gradient.dtype not in _DTYPES:
        raise TypeError("ClipGrads: a gradient is of no float dtype")
    return gradient.dtype


def _promoted(dtypes: tuple[Any, ...]) -> Any:
    """Float32 of no gradients, which a pipeline stage may have."""
    if len(dtypes) > 0 and dtypes == (dtypes[0],) * len(dtypes):
        return dtypes[0]
    return mindspore.float64 if mindspore.float64 in dtypes else mindspore.float32


def _product(coefficient: Tensor, gradient: Tensor) -> Tensor:
    """Computed in float32, or in the float64 of the gradient, and rounded once."""
    wide = mindspore.float64 if gradient.dtype == mindspore.float64 else mindspore.float32
    return (gradient.astype(wide) * coefficient).astype(gradient.dtype)

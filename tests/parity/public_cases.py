"""Small inputs on which public software went wrong, in terms that every backend understands.

Each function runs on every rank of a pool and returns what the test asserts. The numbers are those of the public
reports' list in ``test_public_cases``.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

import hyper_parallel as hp
from hyper_parallel import Partial, Replicate, Shard


def _platform() -> Any:
    return hp.get_platform()


def _tensor(values: Any, dtype: str = "float32") -> Any:
    return _platform().from_numpy(np.asarray(values, dtype=np.float32), dtype, "cpu")


def parameter(
    gradient: Any, mesh: Any = None, placements: Any = (), shape: Any = None, dtype: str = "float32"
) -> Any:
    """A parameter whose ``grad`` has the values given (None: none; then ``shape`` is that of the local tensor)."""
    local = np.zeros(shape) if gradient is None else np.asarray(gradient, dtype=np.float32)
    made = _platform().parameter(_tensor(0 * local, dtype))
    if mesh is not None:
        hp.attach_layout(made, mesh, placements, shape)
    made.grad = _tensor(local, dtype)
    return made


def without_gradient(*args: Any) -> Any:
    made = parameter(*args)
    made.grad = None
    return made


def values(parameters: Any) -> list[Any]:
    return [None if p.grad is None else _platform().to_numpy(p.grad) for p in parameters]


def number(norm: Any) -> float:
    return float(_platform().to_numpy(norm))


def mesh(*sizes: int, names: tuple[str, ...] = ("a", "b", "c")) -> Any:
    return hp.init_device_mesh("cpu", sizes, mesh_dim_names=names[: len(sizes)])


def clip(parameters: Any, p: float = 2.0, max_norm: float = 1.0, **options: Any) -> tuple[float, list[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return number(hp.clip_grad_norm_(parameters, max_norm, p, **options)), values(parameters)


def raised(call: Any) -> tuple[str, str] | None:
    """The type and message of what a call raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        return type(error).__name__, str(error)
    return None


def plain_beside_sharded(foreach: bool | None) -> Any:  # 2
    world = mesh(2)
    sharded = parameter([3.0] if _platform().rank() == 0 else [0.0], world, [Shard(0)], (2,))
    made = [parameter([4.0]), sharded]
    error = raised(lambda: hp.get_total_norm([p.grad for p in made], foreach=foreach))
    return error, values(made) if error else clip(made, foreach=foreach)


def dense_and_experts(p: float) -> Any:  # 16, 18, 19
    """A dense tensor over all 4 ranks, experts over ep=2 with 2 copies each."""
    rank = _platform().rank()
    experts = mesh(2, 2, names=("expert_dp", "ep"))
    return clip(
        [
            parameter(np.full(1, 3.0), mesh(4), [Shard(0)], (4,)),
            parameter(np.full((1, 1), (0.0, 8.0)[rank % 2]), experts, [Replicate(), Shard(0)], (2, 1)),
        ],
        p,
    )


def tiny(p: float) -> Any:  # 5
    return clip([parameter(np.full(2, 1e-7), mesh(4), [Shard(0)], (8,))], p)


def pipeline(p: float) -> Any:  # 7
    stage = _platform().rank()
    return clip([parameter([3.0 + stage])], p, pp_mesh=mesh(2, names=("pp",)))


def negative_infinity_across_stages() -> Any:  # 43
    stage = _platform().rank()
    return clip([parameter([(3.0, -5.0)[stage]])], -math.inf, pp_mesh=mesh(2, names=("pp",)))


def nothing_to_do(p: float, kind: str) -> Any:  # 11
    world = mesh(2)
    everywhere = {
        "no parameters": list,
        "no gradients": lambda: [without_gradient([0.0], world, [Shard(0)], (2,))],
        "no elements": lambda: [parameter(np.zeros((0, 3)), world, [Shard(0)], (0, 3))],
    }
    if kind in everywhere:
        return clip(everywhere[kind](), p)[0]
    build = parameter if _platform().rank() == 1 else without_gradient
    return clip([build([2.0], world, [Shard(0)], (2,))], p)[0]


def tensor_parallel_norm_weight() -> Any:  # 13
    world = mesh(4)
    return clip(
        [parameter([2.0, 2.0], world, [Replicate()]), parameter(np.ones((2, 1)), world, [Shard(0)], (8, 1))]
    )


def experts_as_plain_local_tensors() -> Any:  # 21
    rank = _platform().rank()
    return clip([parameter(np.full((1, 2), rank + 1.0), mesh(4, names=("ep",)), [Shard(0)], (4, 2))])


def replicas_that_disagree(check: bool) -> Any:  # 24
    rank = _platform().rank()
    bad = parameter([3.0, 4.0 + rank], mesh(2), [Replicate()])
    good = parameter([1.0, 2.0], mesh(2), [Replicate()])
    if check:
        error = raised(lambda: hp.clip_grad_norm_([good, bad], 1.0, check_replicas=True))
        return error, values([good, bad])
    return clip([good, bad])


def empty_shard(p: float) -> Any:  # 28
    rank = _platform().rank()
    return clip([parameter([(3.0, -4.0)[rank]] if rank < 2 else np.zeros(0), mesh(4), [Shard(0)], (2,))], p)


def max_norm(value: float, gradient: list[float]) -> Any:  # 31
    made = parameter(gradient, mesh(2), [Replicate()])
    error = raised(lambda: hp.clip_grad_norm_([made], value))
    return error, values([made])[0]


def mixed_dtypes() -> Any:  # 15, 32
    world = mesh(2)
    made = [
        parameter(np.full(64, 1 / 64), world, [Shard(0)], (128,), dtype="bfloat16"),
        parameter(np.full(64, 1 / 64), world, [Shard(0)], (128,)),
        parameter(np.zeros(64), world, [Shard(0)], (128,), dtype="float16"),
    ]
    dtypes = [str(p.grad.dtype).lower() for p in made]
    found = clip(made, max_norm=0.125)
    return found, dtypes, [str(p.grad.dtype).lower() for p in made]


def shared_between_stages(p: float) -> Any:  # 38
    stage = _platform().rank()
    tied = hp.mark_shared(parameter([3.0]), "embedding")
    own = parameter([(4.0, 12.0)[stage]])
    return clip([tied, own], p, pp_mesh=mesh(2, names=("pp",)))


def many_bf16() -> Any:  # 40
    rng = np.random.default_rng(0)
    gradient = rng.standard_normal(1_000_000).astype(np.float32)
    local = np.split(gradient, 2)[_platform().rank()]
    made = [parameter(local, mesh(2), [Shard(0)], (1_000_000,), dtype="bfloat16"), parameter([0.0])]
    before = values(made)[0]
    norm, after = clip(made)
    return norm, before, after[0]


def partial_sum(p: float) -> Any:  # 42
    local = [[1.0, -3.0], [2.0, 1.0]][_platform().rank()]
    return clip([parameter(local, mesh(2), [Partial()])], p)


def partial_with_missing(reduce_op: str, p: float) -> Any:  # 45
    made = parameter([-3.0, 2.0], mesh(2), [Partial(reduce_op)])
    if _platform().rank() == 1:
        made.grad = None
    return clip([made], p)


def nan_anywhere(p: float, placement: Any, holder: int) -> Any:
    gradient = [math.nan, 1.0] if _platform().rank() == holder else [1.0, 2.0]
    shape = (4,) if isinstance(placement, Shard) else (2,)
    return clip([parameter(gradient, mesh(2), [placement], shape), parameter([1.0])], p)[0]


def nonfinite_is_an_error(holder: int) -> Any:
    gradient = [math.inf, 1.0] if _platform().rank() == holder else [1.0, 2.0]
    made = [parameter(gradient, mesh(2), [Shard(0)], (4,)), parameter([1.0])]
    before = values(made)
    error = raised(lambda: hp.clip_grad_norm_(made, 1.0, error_if_nonfinite=True))
    return error, before, values(made)


def lists_that_disagree(what: str) -> Any:
    """Rank 1 has another parameter list than the others; then all clip the same."""
    world, odd = mesh(2), _platform().rank() == 1
    made = [parameter([1.0, 2.0], world, [Shard(0)], (4,))]
    if what == "longer" and odd:
        made.append(parameter([1.0]))
    if what == "shape" and odd:
        made = [parameter([1.0, 2.0, 3.0], world, [Shard(0)], (6,))]
    if what == "placement" and odd:
        made = [parameter([1.0, 2.0], world, [Replicate()])]
    if what == "partial" and odd:
        made = [parameter([1.0, 2.0], world, [Partial()])]
    before = values(made)
    error = raised(lambda: hp.clip_grad_norm_(made, 1.0))
    fine = clip([parameter([3.0], world, [Replicate()])])[0]
    return error, all(np.array_equal(a, b) for a, b in zip(before, values(made), strict=True)), fine


def ill_fitting_local_shape() -> Any:
    """On rank 1 the gradient has another local shape than the layout says."""
    made = parameter([1.0, 2.0], mesh(2), [Shard(0)], (4,))
    gradient = _tensor([1.0, 2.0, 3.0]) if _platform().rank() == 1 else made.grad
    return raised(lambda: hp.clip_grad_norm_([made], 1.0, grads=[gradient]))


def two_partial_dims(p: float) -> Any:
    """Sums along one mesh dim, then maxima along the other, whose second line has no gradient at all."""
    rank = _platform().rank()
    made = without_gradient(None, mesh(2, 2), [Partial("sum"), Partial("max")], (4,))
    given = [None if rank % 2 else _tensor([-1.0 - rank] * 4)]
    return number(hp.clip_grad_norm_([made], 100.0, p, grads=given))


def wrong_gradients(what: str) -> Any:
    """On rank 1 one gradient is too many, or is no tensor; returns the error, the gradient, and the norm after it."""
    made = parameter([3.0, 4.0], mesh(2), [Shard(0)], (4,))
    wrong = {"too many": [made.grad, made.grad], "no tensor": ["gradient"]}[what]
    given = wrong if _platform().rank() == 1 else [made.grad]
    error = raised(lambda: hp.clip_grad_norm_([made], 1.0, grads=given))
    return error, values([made]), number(hp.clip_grad_norm_([made], 1.0, grads=[made.grad]))


def values_clipped(clip_value: float) -> Any:
    made = [parameter([-3.0, 0.5, 4.0]), parameter([2.0], mesh(2), [Shard(0)], (2,))]
    hp.clip_grad_value_(made, clip_value)
    partial = [parameter([5.0], mesh(2), [Partial()])]
    return values(made), raised(lambda: hp.clip_grad_value_(partial, 1.0)), values(partial)

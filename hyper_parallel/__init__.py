"""The gradient norm, and clipping by it, right on any mix of parallelism, on PyTorch and MindSpore.

Importing this package imports neither framework; the first call selects one (see ``get_platform``).
"""

from hyper_parallel.clip_grad import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads,
    clip_grads_with_norm_,
    get_total_norm,
)
from hyper_parallel.core.layout import Area, Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.norm import NormKind
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard, StridedShard
from hyper_parallel.norm_shard_plan import (
    NormShardPlan,
    build_norm_shard_plan,
    combine_pipeline_norm_sq,
    dense_grad_norm_sq_and_refs,
    scale_grad_refs_,
)
from hyper_parallel.platforms import get_platform
from hyper_parallel.sharded_tensor import (
    DTensor,
    attach_layout,
    distribute_tensor,
    init_device_mesh,
    mark_shared,
)

__version__ = "0.1.0"

__all__ = [
    "Area",
    "DTensor",
    "Layout",
    "Mesh",
    "NormKind",
    "NormShardPlan",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
    "attach_layout",
    "build_norm_shard_plan",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads",
    "clip_grads_with_norm_",
    "combine_pipeline_norm_sq",
    "dense_grad_norm_sq_and_refs",
    "distribute_tensor",
    "get_platform",
    "get_total_norm",
    "init_device_mesh",
    "mark_shared",
    "scale_grad_refs_",
]

"""Descriptions that the tests share."""

from __future__ import annotations

from typing import Any

from hyper_parallel.cli.description import parse_description
from hyper_parallel.cli.explain import explain

PACKED = 5 + 2 * 48
"""Numbers in the packed buffer: statistic, NaN, error, stale and announce, and two digests of 24 bits with their
complements. Where pipeline stages meet, one digest more for each stage."""

TP_FSDP = """
world_size: 1024
meshes:
  world: {dp: 128, tp: 8}
parameters:
  - fqn: layers.{0..31}.attention.wq
    shape: [4096, 4096]
    dtype: bfloat16
    mesh: [dp, tp]
    placements: [StridedShard(0, split_factor=8), Shard(0)]
  - fqn: layers.{0..31}.attention.wo
    shape: [4096, 4096]
    dtype: bfloat16
    mesh: [dp, tp]
    placements: [Shard(0), Shard(1)]
  - fqn: layers.{0..31}.norm.weight
    shape: [4096]
    dtype: float32
    mesh: [dp, tp]
    placements: [Shard(0), Replicate()]
"""

HSDP = """
world_size: 16
meshes:
  world: {replicate: 4, shard: 4}
parameters:
  - {fqn: w, shape: [10, 3], mesh: [replicate, shard], placements: "Replicate(), Shard(0)"}
  - {fqn: scale, shape: []}
"""

PIPELINE = """
world_size: 32
meshes:
  world: {pp: 4, dp: 4, tp: 2}
pipeline: pp
parameters:
  - {fqn: "layers.{0..9}.wq", shape: [64, 64], mesh: [dp, tp], placements: "Shard(0), Shard(1)", stages: split}
  - {fqn: embedding, shape: [1000, 64], mesh: [dp], placements: [Shard(0)], stages: [0, 3], shared: emb}
"""

PARTIAL = """
world_size: 8
meshes:
  world: {dp: 2, tp: 4}
parameters:
  - {fqn: w, shape: [16, 4], mesh: [dp, tp], placements: "Shard(0), Shard(1)"}
  - {fqn: router, shape: [3000, 3001], mesh: [dp, tp], placements: "Replicate(), Partial(sum)"}
"""

UNSPANNED = """
world_size: 8
meshes:
  world: {pp: 2, dp: 2, tp: 2}
parameters:
  - {fqn: a, shape: [2048, 2048], mesh: [dp], placements: [Replicate]}
  - {fqn: b, shape: [64, 64], mesh: [tp], placements: [Shard(0)]}
"""


def explained(text: str, rank: int = 0) -> dict[str, Any]:
    """The JSON of one rank."""
    described = parse_description(text)
    described.check_rank(rank)
    return explain(
        described.tensors(rank),
        rank,
        described.groups(rank),
        described.pipeline_mesh(rank),
        itemsizes=described.itemsizes(rank),
        scalar_bytes=described.scalar_bytes,
        world_size=described.world_size,
    ).as_json()

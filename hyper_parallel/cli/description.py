"""A model and its meshes in a small YAML file, from which the plan of any rank follows offline.

    world_size: 1024
    meshes:                              # every rank of the job in an array; dim names and sizes, outermost first
      world: {pp: 2, dp: 64, tp: 8}
      experts: {shape: {ep: 4}, ranks: 0..3}           # of some ranks only
    pipeline: pp                         # optional: the mesh dim of the pipeline stages
    groups: [[dp, tp]]                   # optional: process groups beside those of single mesh dims and of the world
    device: cuda                         # optional: cpu, cuda or npu (which sends statistics as float32)
    parameters:
      - fqn: layers.{0..31}.attention.wq # one of each number
        shape: [4096, 4096]
        dtype: bfloat16                  # of the gradient; float32 if not given
        mesh: [dp, tp]                   # mesh dims, in the order of the mesh
        placements: [Shard(0), Shard(1)] # one for each of them
        stages: split                    # or 0, 0..1 or [0, 3]; if not given, every stage holds such a tensor
      - fqn: embedding.weight
        shape: [128256, 4096]
        shared: embedding                # one tensor that several stages hold (mark_shared)
                                         # without a mesh: a plain tensor, the same on every rank

``groups: slices`` says that any slice of a mesh has a group, as on MindSpore. A mesh dim's name belongs to one mesh.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from pathlib import Path

from hyper_parallel.cli.description_parts import (
    DTYPES,
    Entry,
    Meshes,
    read_entry,
    read_mesh_dims,
    read_meshes,
)
from hyper_parallel.cli.fields import DescriptionError, Field, read_fields
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.plan import TensorMeta
from hyper_parallel.core.union import Groups

_SCALAR_BYTES = {"cpu": 8, "cuda": 8, "npu": 4}


@dataclass(frozen=True, slots=True)
class Description:
    """What the file says. ``groups`` are mesh dims that share a process group."""

    world_size: int
    meshes: Meshes
    entries: tuple[Entry, ...]
    pipeline: str | None
    grouped_dims: tuple[tuple[str, ...], ...]
    scalar_bytes: int

    def check_rank(self, rank: int) -> None:
        """Raise a ``DescriptionError`` if there is no such rank."""
        if rank >= self.world_size:
            raise DescriptionError(f"--rank {rank}: accepted: 0 to {self.world_size - 1}")
        pipeline = self.pipeline_mesh(rank)
        if pipeline is not None and rank not in pipeline.ranks:
            raise DescriptionError(f"--rank {rank}: not in the mesh of the pipeline dim {self.pipeline}")

    def tensors(self, rank: int) -> tuple[TensorMeta, ...]:
        """What the rank's stage holds."""
        return tuple(meta for meta, _ in _held(self, rank))

    def itemsizes(self, rank: int) -> tuple[int, ...]:
        """The bytes of an element, in the order of ``tensors``."""
        return tuple(size for _, size in _held(self, rank))

    def pipeline_mesh(self, rank: int) -> Mesh | None:
        """The mesh of the stages that the rank is a member of."""
        return None if self.pipeline is None else self.meshes.sliced((self.pipeline,), rank)

    def groups(self, rank: int) -> Groups:
        """The process groups that the rank is in."""
        found = {tuple(range(self.world_size))}
        for mesh_dims in self.grouped_dims:
            ranks = self.meshes.sliced(mesh_dims, rank).ranks
            if rank in ranks:
                found.add(tuple(sorted(ranks)))
        return frozenset(found)


@lru_cache(maxsize=4)
def _held(described: Description, rank: int) -> tuple[tuple[TensorMeta, int], ...]:
    pipeline = described.pipeline_mesh(rank)
    stage, stages = (0, 1) if pipeline is None else (pipeline.ranks.index(rank), pipeline.size)
    held = []
    for entry in described.entries:
        layout = None
        if entry.mesh_dims:
            layout = Layout(described.meshes.sliced(entry.mesh_dims, rank), entry.placements, entry.shape)
        shared = entry.shared if pipeline is not None else None
        for name in entry.names_on(stage, stages):
            held.append((TensorMeta(name, entry.shape, layout, shared), DTYPES[entry.dtype]))
    return tuple(held)


def read_description(path: Path) -> Description:
    """Read and check a file.

    Raises:
        DescriptionError: it cannot be read, or something in it is not accepted.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DescriptionError(f"{path}: cannot be read: {error}") from error
    return parse_description(text, str(path))


def parse_description(text: str, file: str = "description") -> Description:
    """The same from text; ``file`` stands in messages.

    Raises:
        DescriptionError: something in it is not accepted.
    """
    fields = read_fields(text, file).record(
        ("world_size", "meshes", "parameters"), ("pipeline", "groups", "device")
    )
    world_size = fields["world_size"].integer(1)
    meshes = read_meshes(fields["meshes"], world_size)
    pipeline = None
    if "pipeline" in fields:
        (pipeline,) = read_mesh_dims(fields["pipeline"], meshes, 1)
    stages = 1 if pipeline is None else meshes.sliced((pipeline,), 0).size
    entries = tuple(read_entry(field, meshes, pipeline, stages) for field in fields["parameters"].items())
    if not entries:
        fields["parameters"].fail("expected at least one parameter")
    _check_names(entries, fields["parameters"])
    device = fields["device"].choice(_SCALAR_BYTES) if "device" in fields else "cuda"
    grouped_dims = _grouped_dims(fields.get("groups"), meshes)
    return Description(world_size, meshes, entries, pipeline, grouped_dims, _SCALAR_BYTES[device])


def _check_names(entries: tuple[Entry, ...], field: Field) -> None:
    """A name may stand for another tensor in another stage, but not twice in one."""
    owners: dict[tuple[str, str], int] = {}
    for number, (entry, place) in enumerate(zip(entries, field.items(), strict=True)):
        for name in entry.names:
            for stage in map(str, entry.stages) if entry.stages else ("any",):
                other = owners.setdefault((name, stage), number)
                if other != number:
                    place.fail(f"{name} is described by {field.path}[{other}] already")


def _grouped_dims(field: Field | None, meshes: Meshes) -> tuple[tuple[str, ...], ...]:
    lines = tuple((name,) for mesh in meshes.roots for name in mesh.dim_names or ())
    if field is None:
        return lines
    if field.is_list:
        return (*lines, *(read_mesh_dims(each, meshes) for each in field.items()))
    field.choice(("slices",))
    return tuple(
        mesh_dims
        for mesh in meshes.roots
        for number in range(1, mesh.ndim + 1)
        for mesh_dims in combinations(mesh.dim_names or (), number)
    )

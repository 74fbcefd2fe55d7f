"""The parts of a description: its meshes and its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hyper_parallel.cli.fields import Field
from hyper_parallel.cli.notation import ACCEPTED_PLACEMENTS, expand, parse_placements, parse_range
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Placement

DTYPES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of an element."""


@dataclass(frozen=True, slots=True)
class Meshes:
    """The meshes of a description; each dim name belongs to one of them."""

    roots: tuple[Mesh, ...]

    def root_of(self, name: str) -> Mesh | None:
        """The mesh that has this dim."""
        return next((root for root in self.roots if name in (root.dim_names or ())), None)

    def sliced(self, mesh_dims: tuple[str, ...], rank: int) -> Mesh:
        """The slice along ``mesh_dims`` through ``rank``, or through the first rank if it is no member."""
        return _sliced(self, mesh_dims, rank)

    @property
    def all_dims(self) -> tuple[str, ...]:
        return tuple(name for root in self.roots for name in root.dim_names or ())


@lru_cache(maxsize=256)
def _sliced(meshes: Meshes, mesh_dims: tuple[str, ...], rank: int) -> Mesh:
    root = meshes.root_of(mesh_dims[0])
    assert root is not None
    names = root.dim_names or ()
    if mesh_dims == names:
        return root
    dims = [names.index(name) for name in mesh_dims]
    member = rank if root.coordinate(rank) is not None else root.ranks[0]
    return Mesh(tuple(root.shape[d] for d in dims), root.slice_ranks(member, dims), mesh_dims, root)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of ``parameters``. ``stages`` None: ``names`` are split over the stages; empty: all stages have them."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    mesh_dims: tuple[str, ...]
    placements: tuple[Placement, ...]
    stages: tuple[int, ...] | None
    shared: str | None

    def names_on(self, stage: int, stages: int) -> tuple[str, ...]:
        """The names that a stage holds; a split gives each stage ``ceil(names / stages)`` of them."""
        if self.stages is None:
            size = -(-len(self.names) // stages)
            return self.names[stage * size : (stage + 1) * size]
        return self.names if not self.stages or stage in self.stages else ()


def read_meshes(field: Field, world_size: int) -> Meshes:
    """``{name: {dim: size, ...}}``, or with the ranks ``{name: {shape: {dim: size}, ranks: 0..7}}``."""
    roots: list[Mesh] = []
    taken: dict[str, str] = {}
    for mesh_name, each in field.mapping().items():
        fields = each.mapping()
        whole = fields if "shape" not in fields else each.record(("shape",), ("ranks",))
        shape = each if whole is fields else whole["shape"]
        sizes = {name: size.integer(1) for name, size in shape.mapping().items()}
        if not sizes:
            shape.fail("expected the mesh's dims, as in {dp: 4, tp: 2}")
        for name in sizes:
            if taken.setdefault(name, mesh_name) != mesh_name:
                shape.fail(f"the dim {name!r} is one of mesh {taken[name]!r} already; give it another name")
        ranks = (
            tuple(range(world_size)) if "ranks" not in whole or whole is fields else _ranks(whole["ranks"])
        )
        if prod(sizes.values()) != len(ranks):
            product = " x ".join(map(str, sizes.values()))
            each.fail(
                f"the sizes {product} = {prod(sizes.values()):,} do not fit {len(ranks):,} ranks; accepted: "
                "dims whose product is world_size, or `shape` and `ranks` for a mesh of some ranks"
            )
        if max(ranks) >= world_size or len(set(ranks)) != len(ranks):
            each.fail(f"expected different ranks below world_size {world_size}")
        roots.append(Mesh(tuple(sizes.values()), ranks, tuple(sizes)))
    return Meshes(tuple(roots))


def _ranks(field: Field) -> tuple[int, ...]:
    """Numbers and ranges."""
    found: list[int] = []
    for each in field.items() if field.is_list else [field]:
        try:
            found.extend(parse_range(each.text()))
        except ValueError as error:
            each.fail(str(error))
    if not found:
        field.fail("expected at least one number")
    return tuple(found)


def read_mesh_dims(field: Field, meshes: Meshes, number: int | None = None) -> tuple[str, ...]:
    """Names of dims of one mesh, in its order."""
    names = tuple(each.text() for each in (field.items() if field.is_list else [field]))
    if not names or (number is not None and len(names) != number):
        field.fail(f"expected {number or 'one or more'} of the mesh dims: {', '.join(meshes.all_dims)}")
    unknown = [name for name in names if meshes.root_of(name) is None]
    if unknown:
        field.fail(f"no mesh has a dim {unknown[0]!r}; accepted: {', '.join(meshes.all_dims) or 'none'}")
    order = (meshes.root_of(names[0]) or meshes.roots[0]).dim_names or ()
    if any(name not in order for name in names):
        field.fail(f"{', '.join(names)} are not dims of one mesh")
    if [name for name in order if name in names] != list(names):
        field.fail(f"expected the order of the mesh: {', '.join(name for name in order if name in names)}")
    return names


def read_entry(field: Field, meshes: Meshes, pipeline: str | None, stages: int) -> Entry:
    """One entry of ``parameters``."""
    fields = field.record(("fqn", "shape"), ("dtype", "mesh", "placements", "stages", "shared"))
    try:
        names = expand(fields["fqn"].text())
    except ValueError as error:
        fields["fqn"].fail(str(error))
    if ("mesh" in fields) != ("placements" in fields):
        field.fail("mesh and placements stand together, or neither does (a plain tensor)")
    mesh_dims = read_mesh_dims(fields["mesh"], meshes) if "mesh" in fields else ()
    if pipeline in mesh_dims:
        fields["mesh"].fail(f"{pipeline} is the pipeline dim, whose stages hold different parameters")
    shape = tuple(size.integer(0) for size in fields["shape"].items())
    placements: tuple[Placement, ...] = ()
    if mesh_dims:
        placements = _placements(fields["placements"])
        try:
            Layout(meshes.sliced(mesh_dims, 0), placements, shape)
        except ValueError as error:
            fields["placements"].fail(str(error))
    return Entry(
        names,
        shape,
        fields["dtype"].choice(DTYPES) if "dtype" in fields else "float32",
        mesh_dims,
        placements,
        _stages(fields.get("stages"), pipeline, stages),
        fields["shared"].text() if "shared" in fields else None,
    )


def _placements(field: Field) -> tuple[Placement, ...]:
    # In a YAML list the comma of StridedShard(0, split_factor=2) parts it in two: put everything together again.
    text = ", ".join(each.text() for each in field.items()) if field.is_list else field.text()
    try:
        placements = parse_placements(text)
    except ValueError as error:
        field.fail(str(error))
    if not placements:
        field.fail(f"expected one placement for each mesh dim: {ACCEPTED_PLACEMENTS}")
    return placements


def _stages(field: Field | None, pipeline: str | None, stages: int) -> tuple[int, ...] | None:
    if field is None:
        return ()
    if pipeline is None:
        field.fail("there are stages only if the description names its `pipeline` dim")
    if not field.is_list and field.text() == "split":
        return None
    found = _ranks(field)
    if max(found) >= stages:
        field.fail(
            f"the stages are 0 to {stages - 1}; accepted: one of them, 0..{stages - 1}, a list, or split"
        )
    return found

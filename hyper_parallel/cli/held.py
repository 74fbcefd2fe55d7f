"""Which rank holds which area of a tensor, over all ranks that count it together: what a picture shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from hyper_parallel.cli.fields import DescriptionError
from hyper_parallel.core.layout import Area, Layout
from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.plan import TensorMeta

_MAX_CHOSEN = 3

Block = tuple[tuple[int, int], tuple[int, int], tuple[int, ...]]
"""Start and extent in the two drawn dims, and the ranks."""


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor, laid out on all ranks that count it: mesh dims that it does not lie on replicate it."""

    name: str
    layout: Layout

    @property
    def dim_names(self) -> tuple[str, ...]:
        mesh = self.layout.mesh
        return mesh.dim_names or tuple(f"dim{d}" for d in range(mesh.ndim))

    @property
    def terms(self) -> int:
        """How many ranks hold Partial terms of the same values."""
        return prod(self.layout.mesh.shape[d] for d in self.layout.partial_dims)

    @property
    def copies(self) -> int:
        return self.layout.mesh.size // (self.layout.num_chunks * self.terms)

    @property
    def drawn_dims(self) -> tuple[int | None, int | None]:
        """The tensor dims downwards and to the right: the two that are cut most, in order; None: there is none."""
        ndim = len(self.layout.global_shape)
        if ndim == 0:
            return None, None
        cuts = [self._pieces(dim) for dim in range(ndim)]
        chosen = sorted(sorted(range(ndim), key=lambda dim: (-cuts[dim], dim))[:2])
        return (chosen[0], chosen[1]) if len(chosen) > 1 else (chosen[0], None)

    @property
    def drawn_sizes(self) -> tuple[int, int]:
        height, width = (1 if dim is None else self.layout.global_shape[dim] for dim in self.drawn_dims)
        return max(height, 1), max(width, 1)

    def areas(self, rank: int) -> tuple[Area, ...]:
        return self.layout.areas(rank)

    def blocks(self) -> tuple[Block, ...]:
        """Every area once, with all ranks that hold it, or that hold areas behind it."""
        found: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
        for rank in self.layout.mesh.ranks:
            for area in self.areas(rank):
                sides = [
                    (0, 1) if dim is None else (area.offsets[dim], area.sizes[dim]) for dim in self.drawn_dims
                ]
                (top, height), (left, width) = sides
                ranks = found.setdefault(((top, left), (height, width)), [])
                if rank not in ranks:
                    ranks.append(rank)
        return tuple((start, extent, tuple(sorted(ranks))) for (start, extent), ranks in found.items())

    def words(self, ranks: Sequence[int]) -> list[str]:
        """Ranks of a block: ``+`` joins the terms of a sum, a comma copies, and ``/`` areas behind each other."""
        layout = self.layout
        spread = [d for d in range(layout.mesh.ndim) if d not in layout.partial_dims]
        keys = {}
        for rank in ranks:
            here = layout.mesh.coordinate(rank) or ()
            keys[rank] = layout.chunk(rank), tuple(here[d] for d in spread)
        ordered = sorted(ranks, key=lambda rank: (keys[rank], rank))
        words = []
        for rank, after in zip(ordered, [*ordered[1:], None], strict=True):
            if after is None:
                words.append(str(rank))
            elif keys[after] == keys[rank]:
                words.append(f"{rank} +")
            else:
                words.append(f"{rank}," if keys[after][0] == keys[rank][0] else f"{rank} /")
        return words

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        """Tensor dims that are cut and not drawn."""
        ndim = len(self.layout.global_shape)
        return tuple(dim for dim in range(ndim) if self._pieces(dim) > 1 and dim not in self.drawn_dims)

    def edges(self, axis: int) -> tuple[int, ...]:
        """Where areas begin and end along a drawn dim."""
        found = {0, self.drawn_sizes[axis]}
        for start, extent, _ in self.blocks():
            found |= {start[axis], start[axis] + extent[axis]}
        return tuple(sorted(found))

    @property
    def strips(self) -> int | None:
        """The drawn dim (0 or 1) that alone is cut, None if both or neither are."""
        cut = [axis for axis, dim in enumerate(self.drawn_dims) if dim is not None and self._pieces(dim) > 1]
        return cut[0] if len(cut) == 1 else None

    def _pieces(self, dim: int) -> int:
        return prod(
            self.layout.mesh.shape[d]
            for d, placement in enumerate(self.layout.placements)
            if isinstance(placement, Shard | StridedShard) and placement.dim == dim
        )


def chosen_tensors(tensors: Sequence[TensorMeta], rank: int, names: Sequence[str]) -> tuple[TensorMeta, ...]:
    """Those of these names, or the first of each kind of layout.

    Raises:
        DescriptionError: this rank holds no tensor of a name, or none at all.
    """
    mine = {
        meta.name: meta
        for meta in tensors
        if meta.layout is None or meta.layout.mesh.coordinate(rank) is not None
    }
    unknown = [name for name in names if name not in mine]
    if unknown or not mine:
        some = ", ".join(list(mine)[:8]) + (", ..." if len(mine) > 8 else "")
        raise DescriptionError(
            f"--parameter {unknown[0] if unknown else ''}: rank {rank} holds no such parameter; it holds: {some or 'none'}"
        )
    if names:
        return tuple(mine[name] for name in names)
    kinds: dict[object, TensorMeta] = {}
    for meta in sorted(mine.values(), key=lambda meta: meta.layout is None):
        layout = meta.layout
        kinds.setdefault(None if layout is None else (layout.mesh, layout.placements), meta)
    return tuple(kinds.values())[:_MAX_CHOSEN]


def held_by(meta: TensorMeta, tensors: Sequence[TensorMeta], rank: int, pipeline: Mesh | None) -> Held:
    """Lay a tensor out on all ranks that count it together with ``rank``: the plan's set, within one stage."""
    meshes = [other.layout.mesh for other in tensors if other.layout is not None]
    own = (
        meta.layout.mesh if meta.layout is not None else max(meshes, key=lambda mesh: mesh.size, default=None)
    )
    if own is None:
        own = Mesh((1,), (rank,))
    root = own.root or own
    if root.coordinate(rank) is None:
        root = own
    used = {d for mesh in meshes if (mesh.root or mesh) == root for d in root.spanned_dims(mesh.ranks) or ()}
    if pipeline is not None and pipeline.root == root:
        used = set(range(root.ndim)) - set(root.spanned_dims(pipeline.ranks) or ())
    dims = sorted(used | set(_own_dims(own, root)))
    if not dims:
        return Held(meta.name, meta.layout or Layout(own, (Replicate(),) * own.ndim, meta.global_shape))
    names = root.dim_names
    mesh = Mesh(
        tuple(root.shape[d] for d in dims),
        root.slice_ranks(rank, dims),
        None if names is None else tuple(names[d] for d in dims),
    )
    placements: list[Placement] = [Replicate()] * len(dims)
    if meta.layout is not None:
        for d, placement in zip(_own_dims(own, root), meta.layout.placements, strict=True):
            placements[dims.index(d)] = placement
    return Held(meta.name, Layout(mesh, tuple(placements), meta.global_shape))


def _own_dims(own: Mesh, root: Mesh) -> tuple[int, ...]:
    """The dims of the root that a mesh lies on, one for each of its own."""
    if own == root:
        return tuple(range(root.ndim))
    if own.dim_names is not None and root.dim_names is not None and set(own.dim_names) <= set(root.dim_names):
        return tuple(root.dim_names.index(name) for name in own.dim_names)
    return root.spanned_dims(own.ranks) or ()

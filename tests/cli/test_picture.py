"""Pictures: that they are real images, and that what they show is what the layouts say."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path

import matplotlib.image
import pytest

from hyper_parallel.cli.description import parse_description
from hyper_parallel.cli.held import held_by
from hyper_parallel.cli.picture import draw
from tests.cli.descriptions import HSDP, PARTIAL, PIPELINE, TP_FSDP, UNSPANNED

SIXTY_FOUR = TP_FSDP.replace("1024", "64").replace("dp: 128", "dp: 8")


def drawn(tmp_path: Path, text: str, suffix: str, rank: int = 0, names: tuple[str, ...] = ()) -> Path:
    described, path = parse_description(text), tmp_path / f"out{suffix}"
    draw(path, described.tensors(rank), rank, names, described.pipeline_mesh(rank))
    return path


@pytest.mark.parametrize("text", [HSDP, PARTIAL, PIPELINE, UNSPANNED, SIXTY_FOUR])
def test_png_has_colours(text: str, tmp_path: Path) -> None:
    image = matplotlib.image.imread(drawn(tmp_path, text, ".png"))
    height, width = image.shape[:2]
    assert width > 1000
    assert height > 700
    assert len({tuple(pixel) for pixel in image[::9, ::9, :3].reshape(-1, 3).round(2)}) > 3


def test_svg_names_every_rank(tmp_path: Path) -> None:
    names = ("layers.0.attention.wo",)
    root = xml.etree.ElementTree.parse(drawn(tmp_path, SIXTY_FOUR, ".svg", names=names)).getroot()
    texts = ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for rank in range(64):
        assert texts.count(str(rank)) >= 2, f"rank {rank} stands in the mesh and in the tensor"
    assert any("64 different pieces" in text for text in texts)


def test_blocks_of_strided_shards() -> None:
    """8 rows on (dp=2, tp=2): rows 0-1 on rank 0, 2-3 on rank 2, 4-5 on rank 1, 6-7 on rank 3."""
    described = parse_description(
        "world_size: 4\nmeshes: {world: {dp: 2, tp: 2}}\nparameters:\n"
        "  - {fqn: w, shape: [8, 6], mesh: [dp, tp], placements: 'StridedShard(0, split_factor=2), Shard(0)'}\n"
    )
    (meta,) = described.tensors(0)
    blocks = held_by(meta, (meta,), 0, None).blocks()
    assert sorted((start[0], extent, ranks) for start, extent, ranks in blocks) == [
        (0, (2, 6), (0,)),
        (2, (2, 6), (2,)),
        (4, (2, 6), (1,)),
        (6, (2, 6), (3,)),
    ]


@pytest.mark.parametrize(
    ("text", "rank", "copies", "ranks"),
    [
        (HSDP, 0, {"w": 4, "scale": 16}, tuple(range(16))),
        (PARTIAL, 0, {"w": 1, "router": 2}, tuple(range(8))),
        (UNSPANNED, 5, {"a": 4, "b": 2}, (4, 5, 6, 7)),
        (PIPELINE, 31, {"layers.9.wq": 1, "embedding": 2}, tuple(range(24, 32))),
    ],
)
def test_shows_the_ranks_that_count_together(
    text: str, rank: int, copies: dict[str, int], ranks: tuple[int, ...]
) -> None:
    described = parse_description(text)
    tensors = described.tensors(rank)
    shown = [held_by(meta, tensors, rank, described.pipeline_mesh(rank)) for meta in tensors]
    assert {held.name: held.copies for held in shown} == copies
    assert {held.layout.mesh.ranks for held in shown} == {ranks}


def test_words_tell_terms_copies_and_hidden_areas_apart() -> None:
    described = parse_description(
        "world_size: 8\nmeshes: {world: {a: 2, b: 2, c: 2}}\nparameters:\n"
        "  - {fqn: sum, shape: [4], mesh: [a, b, c], placements: 'Shard(0), Replicate, Partial'}\n"
        "  - {fqn: cube, shape: [2, 2, 2], mesh: [a, b, c], placements: 'Shard(0), Shard(1), Shard(2)'}\n"
    )
    tensors = described.tensors(0)
    texts = [
        [" ".join(held.words(ranks)) for _, _, ranks in held.blocks()]
        for held in (held_by(meta, tensors, 0, None) for meta in tensors)
    ]
    assert texts == [["0 + 1, 2 + 3", "4 + 5, 6 + 7"], ["0 / 1", "2 / 3", "4 / 5", "6 / 7"]]


def test_long_mesh_dims_are_broken(tmp_path: Path) -> None:
    text = "world_size: 64\nmeshes: {world: {dp: 64}}\nparameters:\n  - {fqn: w, shape: [64], mesh: dp, placements: Shard(0)}"
    assert "dp of the first in a row" in drawn(tmp_path, text, ".svg").read_text()

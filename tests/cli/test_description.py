"""What a description may say, and what it is told when it is wrong: the line, the field and what is accepted."""

from __future__ import annotations

import textwrap

import pytest

from hyper_parallel.cli import description
from hyper_parallel.cli.description import parse_description
from hyper_parallel.cli.fields import DescriptionError
from hyper_parallel.cli.names import common_name, ranks_name
from hyper_parallel.cli.notation import expand, parse_placements
from hyper_parallel.core.placement import Partial, Replicate, Shard, StridedShard

GOOD = """world_size: 8
meshes:
  world: {dp: 4, tp: 2}
parameters:
  - fqn: layers.{0..3}.w
    shape: [8, 4]
    dtype: bfloat16
    mesh: [dp, tp]
    placements: [StridedShard(0, split_factor=2), Shard(0)]
"""


def message(text: str) -> str:
    with pytest.raises(DescriptionError) as caught:
        parse_description(text, "model.yaml")
    return str(caught.value)


def test_good() -> None:
    described = parse_description(GOOD)
    assert [meta.name for meta in described.tensors(0)] == [f"layers.{i}.w" for i in range(4)]
    assert described.itemsizes(0) == (2, 2, 2, 2)
    assert described.tensors(5)[0].layout.local_shape(5) == (1, 4)
    assert described.groups(5) == {tuple(range(8)), (4, 5), (1, 3, 5, 7)}


def test_the_example_of_the_documentation() -> None:
    example = (description.__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[0]
    described = parse_description(textwrap.dedent(example))
    assert [meta.name for meta in described.tensors(512)][:2] == [
        "layers.16.attention.wq",
        "layers.17.attention.wq",
    ]
    assert len(described.tensors(512)) == 17
    assert tuple(range(512, 1024)) in described.groups(600)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("world_size: 8", "world_size: eight", "model.yaml:1: world_size: expected a whole number of at least 1"),
        ("world_size: 8", "world_size: 0", "model.yaml:1: world_size: expected a whole number of at least 1"),
        ("dp: 4", "dp: 3", "model.yaml:3: meshes.world: the sizes 3 x 2 = 6 do not fit 8 ranks"),
        ("{dp: 4, tp: 2}", "[4, 2]", "model.yaml:3: meshes.world: expected a mapping (key: value), got a list"),
        ("dtype: bfloat16", "dtype: bf16", "model.yaml:7: parameters[0].dtype: got 'bf16'; accepted: float64"),
        ("mesh: [dp, tp]", "mesh: [dp, cp]", "model.yaml:8: parameters[0].mesh: no mesh has a dim 'cp'; accepted: dp, tp"),
        ("mesh: [dp, tp]", "mesh: [tp, dp]", "model.yaml:8: parameters[0].mesh: expected the order of the mesh: dp, tp"),
        ("mesh: [dp, tp]", "mesh: [dp]", "model.yaml:9: parameters[0].placements: 2 placements"),
        (", Shard(0)]", ", Shard(2)]", "model.yaml:9: parameters[0].placements: Shard(dim=2) names a dim"),
        (", Shard(0)]", ", Chunk(0)]", "'Chunk(0)' is no placement; accepted: Shard(dim), StridedShard"),
        (", Shard(0)]", ", Shard()]", "'Shard()' is no placement; accepted: Shard(dim)"),
        (", Shard(0)]", ", Partial(mean)]", "unknown reduce_op 'mean'"),
        ("split_factor=2", "split_factor=0", "split_factor must be at least 1"),
        ("    mesh: [dp, tp]\n", "", "model.yaml:5: parameters[0]: mesh and placements stand together"),
        ("    shape: [8, 4]\n", "", "model.yaml:5: parameters[0]: missing shape"),
        ("shape: [8, 4]", "shape: 8", "model.yaml:6: parameters[0].shape: expected a list, got '8'"),
        ("shape: [8, 4]", "shape: [8, -4]", "model.yaml:6: parameters[0].shape[1]: expected a whole number"),
        ("    dtype", "    dtyp", "model.yaml:7: parameters[0].dtyp: unknown key 'dtyp'; accepted: fqn, shape, dtype"),
        ("{0..3}", "{0..}", "braces hold a range of numbers"),
        ("{0..3}", "{3..0}", "stands for 0 names"),
        ("world_size: 8", "world_size: 8\nworld_size: 8", "model.yaml:2: world_size: this key stands here twice"),
        ("world_size: 8", "world_size: 8\npipeline: pp", "model.yaml:2: pipeline: no mesh has a dim 'pp'"),
        ("world_size: 8", "world_size: 8\npipeline: dp", "parameters[0].mesh: dp is the pipeline dim"),
        ("world_size: 8", "world_size: 8\ngroups: all", "model.yaml:2: groups: got 'all'; accepted: slices"),
        ("world_size: 8", "world_size: 8\ndevice: tpu", "model.yaml:2: device: got 'tpu'; accepted: cpu, cuda, npu"),
        ("    dtype: bfloat16", "    stages: 0", "there are stages only if the description names its `pipeline` dim"),
        ("world_size: 8", "world_size: [8", "model.yaml:2: not YAML"),
    ],
)  # fmt: skip
def test_bad(old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert expected in message(GOOD.replace(old, new, 1))


def test_empty() -> None:
    assert "model.yaml: empty" in message("")


def test_the_same_name_twice() -> None:
    again = GOOD + "  - {fqn: layers.2.w, shape: [3]}\n"
    assert "model.yaml:10: parameters[1]: layers.2.w is described by parameters[0] already" in message(again)


def test_one_dim_name_in_two_meshes() -> None:
    assert "the dim 'dp' is one of mesh 'world' already" in message(
        GOOD.replace("parameters:", "  other: {dp: 8}\nparameters:")
    )


def test_stage_that_is_not_there() -> None:
    text = GOOD.replace("world_size: 8", "world_size: 8\npipeline: dp").replace("mesh: [dp, tp]", "mesh: tp")
    text = text.replace("[StridedShard(0, split_factor=2), Shard(0)]", "Shard(0)\n    stages: 4")
    assert "the stages are 0 to 3" in message(text)


def test_placements() -> None:
    assert parse_placements(
        "_StridedShard(dim=-1, split_factor=4), Shard(dim=1), Replicate, Partial('avg')"
    ) == (
        StridedShard(-1, split_factor=4),
        Shard(1),
        Replicate(),
        Partial("avg"),
    )


def test_repeats() -> None:
    assert expand("l.{0..1}.e.{2..3}") == ("l.0.e.2", "l.0.e.3", "l.1.e.2", "l.1.e.3")
    assert common_name(expand("l.{0..1}.e.{2..3}.w")) == "l.{0..1}.e.{2..3}.w"
    assert common_name(["l.0.e.2", "l.1.e.3"]) == "l.*.e.*"


def test_names_of_ranks() -> None:
    assert ranks_name(tuple(range(1024))) == "0-1023"
    assert ranks_name((1, 9, 17, 25)) == "1, 9, .. 25"
    assert ranks_name((5, 7)) == "5, 7"
    assert ranks_name((0, 1, 2, 3, 8, 9, 10, 11)) == "0-3, 8-11"

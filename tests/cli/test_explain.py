"""Explanations of described models; every number below is worked out by hand."""

from __future__ import annotations

import pytest

from tests.cli.descriptions import HSDP, PACKED, PARTIAL, PIPELINE, TP_FSDP, UNSPANNED, explained


def kinds(found: dict) -> list[str]:
    return [warning["kind"] for warning in found["warnings"]]


def terms(found: dict) -> list[dict]:
    return [term for part in found["parts"] for term in part["terms"]]


@pytest.mark.parametrize("rank", [0, 9, 1023])
def test_tp_and_fsdp_on_1024_ranks(rank: int) -> None:
    found = explained(TP_FSDP, rank)
    matrices, norms = terms(found)
    # 4096 x 4096 over 1,024 ranks are 16,384 elements; 4096 over 128 are 32, on 8 ranks each.
    assert [group["elements"] for group in matrices["parameters"]] == [32 * 16384, 32 * 16384]
    assert (matrices["num_parameters"], matrices["copies"]) == (64, 1)
    assert (norms["elements"], norms["copies"]) == (32 * 32, 8)
    # One packed buffer in float64.
    assert found["collectives"] == [
        {
            "op": "all_reduce",
            "reduce_op": "sum",
            "purpose": "statistic",
            "num_ranks": 1024,
            "ranks": [[0, 1024, 1]],
            "elements": PACKED,
            "bytes": 8 * PACKED,
            "repeats": 1,
        }
    ]
    assert found["totals"] == {
        "parameters": 96,
        "collectives": 1,
        "bytes": 8 * PACKED,
        "elements_read": 64 * 16384 + 32 * 32,
        "bytes_read": 2 * 64 * 16384 + 4 * 32 * 32,
    }
    assert kinds(found) == ["host_waits"]
    assert "32 parameters are held by several ranks" in found["warnings"][0]["text"]


def test_keys_are_stable() -> None:
    found = explained(PARTIAL)
    assert list(found) == [
        "format", "rank", "world_size", "totals", "host_waits", "parts", "last", "collectives", "warnings",
    ]  # fmt: skip
    assert list(found["parts"][0]) == ["num_ranks", "holders", "terms", "collectives"]
    assert list(terms(found)[0]) == [
        "kind", "parameters", "num_parameters", "elements", "copies", "shared", "buckets", "elements_reduced",
    ]  # fmt: skip
    assert list(terms(found)[0]["parameters"][0]) == [
        "name", "count", "global_shape", "mesh", "placements", "elements",
    ]  # fmt: skip
    assert found["format"] == 1


def test_group_of_parameters() -> None:
    assert terms(explained(TP_FSDP))[0]["parameters"][0] == {
        "name": "layers.{0..31}.attention.wq",
        "count": 32,
        "global_shape": [4096, 4096],
        "mesh": {"dp": 128, "tp": 8},
        "placements": ["StridedShard(0, split_factor=8)", "Shard(0)"],
        "elements": 524288,
    }


@pytest.mark.parametrize(("rank", "rows"), [(0, 3), (3, 1), (15, 1)])
def test_hsdp(rank: int, rows: int) -> None:
    """10 rows over 4 shards are 3, 3, 3 and 1; each on 4 replicas. A plain scalar is on all 16 ranks."""
    found = explained(HSDP, rank)
    copies = {group["name"]: term["copies"] for term in terms(found) for group in term["parameters"]}
    assert copies == {"w": 4, "scale": 16}
    assert found["totals"]["elements_read"] == rows * 3 + 1
    assert (found["totals"]["collectives"], found["host_waits"]) == (1, True)
    assert "w, scale" in found["warnings"][0]["text"]


def test_no_copies_do_not_wait() -> None:
    matrices, _, _ = TP_FSDP.partition("  - fqn: layers.{0..31}.norm")
    found = explained(matrices)
    assert found["host_waits"] is False
    assert found["warnings"] == []


@pytest.mark.parametrize(
    ("rank", "names"),
    [(0, {"layers.{0..2}.wq", "embedding"}), (8, {"layers.{3..5}.wq"}), (31, {"layers.9.wq", "embedding"})],
)
def test_pipeline_stages_take_one_all_reduce(rank: int, names: set[str]) -> None:
    """10 layers over 4 stages are 3, 3, 3 and 1. The 250 rows of a dp shard are held by both ranks of tp."""
    found = explained(PIPELINE, rank)
    assert {group["name"] for term in terms(found) for group in term["parameters"]} == names
    (collective,) = found["collectives"]
    assert (collective["purpose"], collective["num_ranks"], collective["bytes"]) == (
        "stages",
        32,
        8 * (PACKED + 4 * 48),
    )
    assert (found["parts"][0]["num_ranks"], found["parts"][0]["holders"]) == (32, 8)
    for term in terms(found):
        shared = term["shared"] == "emb"
        assert term["copies"] == (2 if shared else 1)
        assert term["elements"] == (250 * 64 if shared else 512 * term["num_parameters"])


def test_partial_gradients_are_reduced_in_buckets() -> None:
    """9,003,000 elements are two buckets of 4 * 2**20 and one of 614,392; a quarter stays with each rank."""
    found = explained(PARTIAL, 5)
    rest = 9_003_000 - 2 * 4 * 2**20
    steps = [
        (c["op"], c["reduce_op"], c["purpose"], c["ranks"], c["elements"], c["bytes"], c["repeats"])
        for c in found["collectives"]
    ]
    assert steps == [
        ("all_reduce", "sum", "agree", [[0, 8, 1]], PACKED, 8 * PACKED, 1),
        ("all_reduce", "max", "flags", [[4, 8, 1]], 2, 16, 1),
        ("reduce_scatter", "sum", "bucket", [[4, 8, 1]], 4 * 2**20, 16 * 2**20, 2),
        ("reduce_scatter", "sum", "bucket", [[4, 8, 1]], rest, 4 * rest, 1),
        ("all_reduce", "sum", "statistic", [[0, 8, 1]], PACKED, 8 * PACKED, 1),
    ]
    partial = terms(found)[1]
    assert (partial["kind"], partial["buckets"], partial["copies"]) == ("partial", 3, 2)
    assert partial["elements_reduced"] == 9_003_000 // 4
    assert found["totals"]["collectives"] == 6
    assert found["totals"]["bytes"] == 2 * 8 * PACKED + 16 + 4 * 9_003_000
    assert found["totals"]["elements_read"] == 8 + 9_003_000 + 9_003_000 // 4
    assert kinds(found) == ["partial", "host_waits"]
    assert "3 reduce-scatters of 34.3 MB" in found["warnings"][0]["text"]


def test_ranks_without_a_group_are_reached_one_mesh_dim_after_another() -> None:
    found = explained(UNSPANNED, 5)
    assert [collective["ranks"] for collective in found["collectives"]] == [[[5, 9, 2]], [[4, 6, 1]]]
    assert kinds(found) == ["replicated", "several_steps", "host_waits"]
    assert found["warnings"][0]["parameters"] == ["a"]
    assert "all 4,194,304 elements" in found["warnings"][0]["text"]


@pytest.mark.parametrize("groups", ["groups: slices", "groups: [[dp, tp]]"])
def test_a_group_that_spans_them_makes_it_one(groups: str) -> None:
    found = explained(f"{groups}\n{UNSPANNED}", 5)
    assert [collective["ranks"] for collective in found["collectives"]] == [[[4, 8, 1]]]
    assert "several_steps" not in kinds(found)


def test_meshes_without_a_common_root_take_several_parts() -> None:
    text = """
world_size: 4
meshes: {one: {shape: {a: 2}, ranks: [0, 1]}, other: {shape: {b: 2}, ranks: [0, 2]}}
parameters:
  - {fqn: x, shape: [4], mesh: [a], placements: [Shard(0)]}
  - {fqn: y, shape: [4], mesh: [b], placements: [Shard(0)]}
"""
    assert kinds(explained(text, 0)) == ["several_parts", "host_waits"]
    assert kinds(explained(text, 1)) == []
    assert explained(text, 3)["totals"]["parameters"] == 0


def test_a_mesh_that_cannot_have_sisters_is_an_error() -> None:
    text = """
world_size: 8
meshes: {world: {dp: 8}, odd: {shape: {ep: 3}, ranks: 0..2}}
parameters:
  - {fqn: x, shape: [8], mesh: [dp], placements: [Shard(0)]}
  - {fqn: e, shape: [3], mesh: [ep], placements: [Shard(0)]}
"""
    assert kinds(explained(text, 0))[0] == "error"


def test_plain_parameters_only() -> None:
    found = explained("world_size: 4\nmeshes: {world: {dp: 4}}\nparameters: [{fqn: x, shape: [3]}]")
    assert (found["collectives"], kinds(found)) == ([], ["nothing_communicated"])


def test_an_npu_sends_float32() -> None:
    assert explained(f"device: npu\n{TP_FSDP}")["totals"]["bytes"] == 4 * PACKED

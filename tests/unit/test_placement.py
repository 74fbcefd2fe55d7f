"""Placements are values: frozen, comparable, checked when built."""

from __future__ import annotations

import dataclasses

import pytest

from hyper_parallel.core.placement import REDUCE_OPS, Partial, Replicate, Shard, StridedShard


def test_defaults() -> None:
    assert Shard() == Shard(0)
    assert StridedShard() == StridedShard(0, split_factor=1)
    assert Partial() == Partial("sum")


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_partial_takes_each_reduce_op(op: str) -> None:
    assert Partial(op).reduce_op == op
    assert op in REDUCE_OPS


@pytest.mark.parametrize("op", ["product", "SUM", "", None])
def test_partial_refuses_other_reduce_ops_and_lists_what_is_accepted(op: object) -> None:
    with pytest.raises(ValueError, match=r"unknown reduce_op.*sum.*avg.*max.*min"):
        Partial(op)  # type: ignore[arg-type]


@pytest.mark.parametrize("factor", [0, -1])
def test_strided_shard_refuses_a_split_factor_below_1(factor: int) -> None:
    with pytest.raises(ValueError, match=f"split_factor must be at least 1, got {factor}"):
        StridedShard(0, split_factor=factor)


def test_split_factor_is_named() -> None:
    with pytest.raises(TypeError):
        StridedShard(0, 2)  # type: ignore[misc]


def test_kinds_never_equal_each_other() -> None:
    kinds = [
        Shard(0),
        Shard(1),
        StridedShard(0),
        StridedShard(0, split_factor=2),
        Replicate(),
        Partial("max"),
    ]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("placement", [Shard(0), StridedShard(0), Partial()])
def test_they_are_frozen(placement: object) -> None:
    field = dataclasses.fields(placement)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(placement, field, 1)

"""In place of ``torch.nn.utils.clip_grad_norm_``: the same bits where both accumulate alike, else the better ones.

Alike is: ``inf`` and ``-inf`` on float32 gradients, sharded or not; ``p=2`` on one float32 tensor of up to 128
elements. Elsewhere torch adds up each tensor, and the norms of all tensors, in the gradients' dtype; we add up
blocks of 128 elements in float32 and the blocks in float64. float16, bfloat16 and float64 gradients are scaled by a
float32 coefficient here, and by one of their own dtype there.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

import hyper_parallel
from tests.torch_backend.oracle import graded, norm_of, wide

if TYPE_CHECKING:
    from tests.conftest import Pools

pytestmark = pytest.mark.timeout(180)
INF = math.inf


def clipped_twice(
    sizes: list[int], p: float, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    """[norm, gradients...] of ours and of torch, and the norm in float64."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    results = []
    for call in (hyper_parallel.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        parameters = [graded(value.clone()) for value in values]
        results.append([call(parameters, 0.1, p), *(parameter.grad for parameter in parameters)])
    return results[0], results[1], norm_of(map(wide, values), p)


@pytest.mark.parametrize("p", [INF, -INF])
@pytest.mark.parametrize("sizes", [[7], [64] * 3, [144, 12, 288] * 10, [90_000], [2_000_000, 5]], ids=str)
def test_infinite_orders_give_the_same_bits(sizes: list[int], p: float) -> None:
    for seed in range(5):
        ours, theirs, _ = clipped_twice(sizes, p, seed)
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("size", [1, 7, 64, 100, 128])
def test_one_tensor_of_one_block_gives_the_same_bits(size: int) -> None:
    for seed in range(20):
        ours, theirs, _ = clipped_twice([size], 2.0, seed)
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(
    ("sizes", "p"), [([300_000], 2.0), ([2_000_000], 2.0), ([90_000], 1.0), ([90_000], 3.0)], ids=str
)
def test_larger_tensors_give_a_norm_closer_to_float64(sizes: list[int], p: float) -> None:
    ours, theirs, exact = clipped_twice(sizes, p, 0)
    our_error, their_error = (abs(found[0].item() / exact - 1) for found in (ours, theirs))
    assert our_error < 1.2e-7
    assert their_error > 5 * our_error


def test_many_small_tensors_agree_to_float32_rounding() -> None:
    for seed in range(10):
        ours, theirs, exact = clipped_twice([144, 12, 288] * 10, 2.0, seed)
        assert ours[0].item() == pytest.approx(exact, rel=1.2e-7)
        assert theirs[0].item() == pytest.approx(exact, rel=5e-7)


@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp", 1), ("fsdp", 2), ("hsdp", 4)])
def test_sharded_models(strategy: str, world_size: int, pools: Pools) -> None:
    target = "tests.torch_backend.drop_in:both"
    for rank in pools.get("torch", world_size).run(target, strategy, (INF, -INF, 2.0), timeout=100):
        for found in rank[:2]:
            assert found["norms"][0] == found["norms"][1]
            assert found["gradients"]
        ours, theirs = rank[2]["norms"]
        assert ours == pytest.approx(theirs, rel=3e-7)
        assert rank[2]["gradients"] == (ours == theirs)

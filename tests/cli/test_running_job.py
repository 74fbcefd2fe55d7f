"""What ``explain_model`` announces in a running job is what ``clip_grad_norm_`` then does, on every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.descriptions import PACKED
from tests.named_backends import BACKENDS

if TYPE_CHECKING:
    from tests.conftest import Pools

BUCKET = 4 * 2**20


@pytest.mark.timeout(180)
@pytest.mark.parametrize("large", [7, BUCKET + 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_announces_what_happens(backend: str, large: int, pools: Pools) -> None:
    found = pools.get(backend, 2).run("tests.cli.rank_explanations:announced_and_called", large, timeout=60)
    for rank, (announced, called, explanation, printed, norm) in enumerate(found):
        assert called == announced
        assert len(called) == explanation["totals"]["collectives"]
        # 12 ones in the sharded matrix, 5 and 4 in the copies, 2 in each of `large` sums, 3 maxima.
        assert norm == pytest.approx((12 + 5 + 4 + 4 * large + 3) ** 0.5, rel=1e-6)
        assert (explanation["rank"], explanation["world_size"]) == (rank, 2)
        assert ("A step" in printed) == (rank == 0)
        slices = -(-large // 2) if large <= BUCKET else BUCKET // 2 + 1
        assert explanation["totals"]["elements_read"] == 6 + 5 + 4 + large + 3 + slices + 2
        assert explanation["totals"]["bytes_read"] == 4 * explanation["totals"]["elements_read"]


@pytest.mark.timeout(180)
def test_fsdp2_on_one_rank_alone(pools: Pools) -> None:
    """Explaining communicates nothing, so one rank may ask while the other goes on."""
    (_, norm), (found, other) = pools.get("torch", 2).run(
        "tests.cli.rank_explanations:explain_fsdp", timeout=60
    )
    assert norm == other
    assert found["totals"] == {
        "parameters": 6,
        "collectives": 1,
        "bytes": 8 * PACKED,
        "elements_read": 3 * (32 + 4),
        "bytes_read": 4 * 3 * (32 + 4),
    }
    (term,) = found["parts"][0]["terms"]
    assert [(group["name"], group["count"]) for group in term["parameters"]] == [
        ("{0..2}.weight", 3),
        ("{0..2}.bias", 3),
    ]
    assert term["parameters"][0]["mesh"] == {"dp": 2}
    assert found["warnings"] == []

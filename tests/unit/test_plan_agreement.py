"""Digests of plans: what the ranks must agree on, and that they find it in every process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hyper_parallel.core.mesh import Mesh
from hyper_parallel.core.placement import Replicate, Shard
from hyper_parallel.core.plan import DIGEST_BITS, build_plan, digest_bits
from tests.unit.plans import ROOT, WORLD, meta, only_part, plans, sliced


def test_sister_slices_have_the_same_digest() -> None:
    found = plans(lambda rank: [meta("a", sliced(ROOT, rank, "dp", "tp"), Shard(0), Shard(1))], range(4))
    assert len({only_part(plan).digest for plan in found.values()}) == 1


BASE = (meta("a", WORLD, Shard(0)), meta("b", None, shape=(3,)))
OTHERS = {
    "name": (meta("x", WORLD, Shard(0)), BASE[1]),
    "shape": (meta("a", WORLD, Shard(0), shape=(8, 5)), BASE[1]),
    "placement": (meta("a", WORLD, Replicate()), BASE[1]),
    "order": BASE[::-1],
    "one less": BASE[:1],
    "one more": (*BASE, meta("c", None)),
    "mesh": (meta("a", Mesh((4, 2), tuple(range(8))), Shard(0), Replicate()), BASE[1]),
    "no layout": (meta("a", None), meta("b", WORLD, Replicate(), shape=(3,))),
}


@pytest.mark.parametrize("difference", OTHERS)
def test_another_digest_for_another(difference: str) -> None:
    one, other = (only_part(build_plan(tensors, 0, frozenset())) for tensors in (BASE, OTHERS[difference]))
    assert one.digest != other.digest
    assert 0 <= one.digest < 2**DIGEST_BITS


def test_digests_are_the_same_in_every_process_whatever_its_hash_seed() -> None:
    code = (
        "from tests.unit.test_plan_agreement import BASE, build_plan\n"
        "print([part.digest for part in build_plan(BASE, 3, frozenset()).parts])"
    )
    expected = str([part.digest for part in build_plan(BASE, 3, frozenset()).parts])
    for seed in ("0", "1"):
        printed = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
        assert printed.stdout.strip() == expected


def test_digest_bits_of_known_texts() -> None:
    assert digest_bits("") != digest_bits("a")
    assert digest_bits("a") == digest_bits("a")


def test_plans_are_kept() -> None:
    assert build_plan(BASE, 1, frozenset()) is build_plan(tuple(BASE), 1, frozenset())


def test_a_tensor_prints_with_all_that_must_agree() -> None:
    text = str(meta("w", ROOT, Shard(0), Replicate(), Shard(1)))
    assert text.startswith("w: shape (8, 4)")
    for word in ("Shard(dim=0)", "Replicate()", "Shard(dim=1)", "'pp': 2", "'dp': 2", "'tp': 2"):
        assert word in text
    assert str(meta("b", None)) == "b: shape (8, 4), replicated"

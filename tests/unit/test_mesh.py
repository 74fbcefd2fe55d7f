"""Meshes against NumPy's own indexing."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.mesh import Mesh

bounded = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Any shape of up to 24 ranks, with ranks in any order and with gaps."""
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    size = int(np.prod(shape))
    ranks = draw(st.permutations(range(size + 3)))[:size]
    return Mesh(shape, tuple(ranks))


@bounded
@given(meshes())
def test_coordinates(mesh: Mesh) -> None:
    array = np.array(mesh.ranks).reshape(mesh.shape)
    for index in np.ndindex(*mesh.shape):
        assert mesh.coordinate(int(array[index])) == index
    for stranger in set(range(30)) - set(mesh.ranks):
        assert mesh.coordinate(stranger) is None
    assert (mesh.ndim, mesh.size) == (array.ndim, array.size)


@bounded
@given(meshes(), st.data())
def test_slice_ranks(mesh: Mesh, data: st.DataObject) -> None:
    array = np.array(mesh.ranks).reshape(mesh.shape)
    rank = data.draw(st.sampled_from(mesh.ranks))
    here = np.argwhere(array == rank)[0]
    for number in range(mesh.ndim + 1):
        for dims in combinations(range(mesh.ndim), number):
            index = tuple(slice(None) if d in dims else here[d] for d in range(mesh.ndim))
            expected = tuple(int(r) for r in np.atleast_1d(array[index]).reshape(-1))
            assert mesh.slice_ranks(rank, dims) == expected


@bounded
@given(meshes(), st.data())
def test_spanned_dims(mesh: Mesh, data: st.DataObject) -> None:
    """Some ranks are a slice exactly if moving along some dims from one of them gives them all."""
    ranks = data.draw(st.lists(st.sampled_from(range(12)), min_size=1, unique=True))
    wide = [d for d in range(mesh.ndim) if mesh.shape[d] > 1]
    expected = None
    for number in range(len(wide) + 1):
        for dims in combinations(wide, number):
            if ranks[0] in mesh.ranks and set(mesh.slice_ranks(ranks[0], dims)) == set(ranks):
                expected = dims
    assert mesh.spanned_dims(ranks) == expected


@bounded
@given(meshes(), st.data())
def test_spanned_dims_of_a_slice_are_the_dims_it_was_cut_along(mesh: Mesh, data: st.DataObject) -> None:
    dims = data.draw(st.sets(st.sampled_from(range(mesh.ndim))))
    rank = data.draw(st.sampled_from(mesh.ranks))
    wide = tuple(sorted(d for d in dims if mesh.shape[d] > 1))
    assert mesh.spanned_dims(mesh.slice_ranks(rank, dims)) == wide


def test_the_example_of_the_docstring() -> None:
    mesh = Mesh((2, 2), (0, 1, 2, 3), ("dp", "tp"))
    assert mesh.slice_ranks(0, (0,)) == (0, 2)
    assert mesh.slice_ranks(1, (0,)) == (1, 3)


def test_slice_ranks_of_a_stranger() -> None:
    with pytest.raises(ValueError, match=r"rank 7 is not in the mesh of ranks \(0, 1\)"):
        Mesh((2,), (0, 1)).slice_ranks(7, (0,))


@pytest.mark.parametrize(("shape", "ranks"), [((2, 2), (0, 1, 2)), ((0,), ()), ((3,), (0, 1, 2, 3))])
def test_sizes_that_do_not_fit(shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"needs .* ranks \(at least 1\), got"):
        Mesh(shape, ranks)


def test_a_rank_named_twice() -> None:
    with pytest.raises(ValueError, match=r"a rank appears twice in \(0, 1, 0\)"):
        Mesh((3,), (0, 1, 0))


def test_names_that_are_not_as_many_as_dims() -> None:
    with pytest.raises(ValueError, match=r"2 dimensions but names \('dp',\)"):
        Mesh((1, 2), (0, 1), ("dp",))


def test_equal_meshes_have_equal_hashes_and_the_root_counts() -> None:
    root = Mesh((2, 2), (0, 1, 2, 3))
    assert Mesh((2,), (0, 1), ("tp",), root) == Mesh((2,), (0, 1), ("tp",), Mesh((2, 2), (0, 1, 2, 3)))
    assert hash(Mesh((2,), (0, 1))) == hash(Mesh((2,), (0, 1)))
    assert Mesh((2,), (0, 1), None, root) != Mesh((2,), (0, 1))


def test_equal_meshes_hash_alike_also_from_another_process() -> None:
    root = Mesh((2, 2), (0, 1, 2, 3), ("dp", "tp"))
    mesh = Mesh((2,), (1, 3), ("dp",), root)
    assert {mesh: 1} == {Mesh((2,), (1, 3), ("dp",), Mesh((2, 2), (0, 1, 2, 3), ("dp", "tp"))): 1}
    code = (
        "import pickle, sys; from hyper_parallel.core.mesh import Mesh; "
        "root = Mesh((2, 2), (0, 1, 2, 3), ('dp', 'tp')); "
        "sys.stdout.buffer.write(pickle.dumps(Mesh((2,), (1, 3), ('dp',), root)))"
    )
    for seed in ("1", "2"):  # names hash otherwise there
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=60
        )
        received = pickle.loads(done.stdout)
        assert {mesh: 1} == {received: 1}
        assert received.root == root


def test_meshes_that_differ_in_one_thing() -> None:
    mesh = Mesh((2, 2), (0, 1, 2, 3), ("dp", "tp"))
    others = [
        Mesh((4, 1), (0, 1, 2, 3), ("dp", "tp")),
        Mesh((2, 2), (0, 1, 3, 2), ("dp", "tp")),
        Mesh((2, 2), (0, 1, 2, 3), ("dp", "ep")),
        Mesh((2, 2), (0, 1, 2, 3)),
        Mesh((2, 2), (0, 1, 2, 3), ("dp", "tp"), Mesh((8,), tuple(range(8)))),
    ]
    assert len({mesh, *others}) == len(others) + 1

"""The methods of an adapter behind Partial gradients, clipping by value, the check of replicas, and conversion."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hyper_parallel import Mesh
from hyper_parallel.core.norm import NormKind
from hyper_parallel.interface import Platform
from hyper_parallel.platforms import get_platform
from tests.contract.backends import Kit, rounded


@pytest.fixture
def platform(kit: Kit) -> Platform:
    return get_platform()


def number(platform: Platform, scalar) -> float:
    return platform.read(scalar, True)[0]


# ---- flatten


def test_flatten_puts_ranges_one_after_another_and_fills_the_rest(kit: Kit, platform: Platform) -> None:
    a, b = kit.tensor([[1.0, 2.0], [3.0, 4.0]]), kit.tensor([5.0, 6.0, 7.0])
    buffer = platform.flatten([(a, 1, 4), (None, 0, 2), (b, 0, 2), (b, 2, 2)], 9, -math.inf, a)
    fill = -math.inf
    assert platform.read(buffer, True) == [2.0, 3.0, 4.0, fill, fill, 5.0, 6.0, fill, fill]


def test_flatten_takes_every_dtype_and_0d_and_empty_tensors(kit: Kit, platform: Platform) -> None:
    pieces = [(kit.tensor([0.5, -1.5], dtype), 0, 2) for dtype in kit.dtypes]
    extra = [(kit.tensor(2.0), 0, 1), (kit.tensor(np.zeros((0, 3))), 0, 0)]
    buffer = platform.flatten([*pieces, *extra], 2 * len(pieces) + 1, 0.0, pieces[0][0])
    assert platform.read(buffer, True) == [0.5, -1.5] * len(pieces) + [2.0]


def test_flatten_reads_a_transposed_tensor_in_its_own_order(kit: Kit, platform: Platform) -> None:
    values = np.arange(6.0).reshape(2, 3)
    buffer = platform.flatten([(kit.transposed(kit.tensor(values)), 0, 6)], 6, 0.0, None)
    assert platform.read(buffer, True) == values.T.reshape(-1).tolist()


def test_flatten_copies(kit: Kit, platform: Platform) -> None:
    tensor = kit.tensor([1.0, 2.0])
    buffer = platform.flatten([(tensor, 0, 2)], 2, 0.0, tensor)
    platform.scale_([tensor], platform.cast(0.0, None, tensor), None)
    assert kit.array(tensor).tolist() == [0.0, 0.0]
    assert platform.read(buffer, True) == [1.0, 2.0]


def test_the_norm_of_a_slice_of_a_flat_buffer(kit: Kit, platform: Platform) -> None:
    buffer = platform.flatten([(kit.tensor([9.0, 3.0, 4.0, 9.0]), 0, 4)], 4, 0.0, None)
    assert number(platform, platform.statistic([buffer[1:3]], NormKind(2), None)) == 25.0


def test_flatten_of_nothing_but_missing_tensors(kit: Kit, platform: Platform) -> None:
    assert platform.read(platform.flatten([(None, 0, 2)], 3, 0.25, kit.tensor([1.0])), True) == [0.25] * 3


# ---- clamp_


@pytest.mark.parametrize("foreach", [None, False])
def test_clamp_changes_the_original_of_every_dtype(
    kit: Kit, platform: Platform, foreach: bool | None
) -> None:
    values = np.array([[-3.0, -0.5], [0.25, 4.0]])
    tensors = [kit.tensor(values, dtype) for dtype in kit.dtypes]
    transposed = kit.transposed(kit.tensor(values))
    platform.clamp_([*tensors, transposed], 1.0, foreach)
    for tensor, dtype in zip(tensors, kit.dtypes, strict=True):
        assert kit.array(tensor).tolist() == [[-1.0, -0.5], [0.25, 1.0]]
        assert kit.dtype(tensor) == dtype
    assert kit.array(transposed).tolist() == [[-1.0, 0.25], [-0.5, 1.0]]


def test_clamp_of_0d_empty_and_repeated_tensors(kit: Kit, platform: Platform) -> None:
    scalar, empty = kit.tensor(-7.0), kit.tensor(np.zeros((0, 2)))
    platform.clamp_([scalar, empty, scalar], 2.5, None)
    assert kit.array(scalar) == -2.5
    assert tuple(empty.shape) == (0, 2)


def test_clamp_keeps_nan_and_bounds_infinity(kit: Kit, platform: Platform) -> None:
    tensor = kit.tensor([math.nan, math.inf, -math.inf])
    platform.clamp_([tensor], 1.0, None)
    np.testing.assert_array_equal(kit.array(tensor), [math.nan, 1.0, -1.0])


# ---- checksum


@pytest.mark.parametrize("position", [0, 1, 1000, 4095, 4096, 8189, 8190, 8191, 8192, 16381, 19999])
def test_checksum_sees_a_change_of_any_element(kit: Kit, platform: Platform, position: int) -> None:
    values = np.random.default_rng(1).standard_normal(20000)
    changed = values.copy()
    changed[position] += 0.5
    checksums = [number(platform, platform.checksum(kit.tensor(v))) for v in (values, values.copy(), changed)]
    assert checksums[0] == checksums[1]
    assert checksums[0] != checksums[2]


@pytest.mark.parametrize("distance", [1, 64, 4096, 8191, 8192])
def test_checksum_sees_that_elements_have_changed_places(kit: Kit, platform: Platform, distance: int) -> None:
    values = np.random.default_rng(1).standard_normal(20000)
    swapped = values.copy()
    swapped[[10, 10 + distance]] = values[[10 + distance, 10]]
    a, b = (number(platform, platform.checksum(kit.tensor(v))) for v in (values, swapped))
    assert a != b


def test_checksum_of_0d_and_empty_tensors(kit: Kit, platform: Platform) -> None:
    for values in (np.array(2.0), np.zeros((0, 3))):
        a, b = (number(platform, platform.checksum(kit.tensor(values))) for _ in range(2))
        assert a == b


# ---- meshes and conversion


def test_a_core_mesh_is_its_own_mesh(kit: Kit, platform: Platform) -> None:
    mesh = Mesh((2, 2), (0, 1, 2, 3), ("pp", "dp"))
    assert platform.mesh(mesh) == mesh


def test_from_numpy_and_back(kit: Kit, platform: Platform) -> None:
    values = rounded(np.random.default_rng(2).standard_normal((3, 4)), "float32")
    for dtype in kit.dtypes:
        for array in (values, np.array(1.5), np.zeros((0, 2))):
            tensor = platform.from_numpy(array, dtype, kit.device_type)
            assert kit.dtype(tensor) == dtype
            back = platform.to_numpy(tensor)
            assert back.dtype == np.float64
            assert back.shape == array.shape
            assert (back == rounded(array, dtype)).all()


def test_parameter_makes_a_trainable_parameter(kit: Kit, platform: Platform) -> None:
    parameter = platform.parameter(platform.from_numpy(np.ones(3), "float32", kit.device_type))
    assert parameter.requires_grad
    assert platform.parameters(parameter)[0][0] is parameter
    assert platform.to_numpy(parameter).tolist() == [1.0, 1.0, 1.0]

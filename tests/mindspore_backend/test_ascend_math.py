"""The arithmetic for NPUs, as far as the CPU has its operations; nothing here was run on an NPU."""

from __future__ import annotations

import math

import mindspore
import numpy as np
import pytest
from mindspore import Tensor

from hyper_parallel import NormKind
from hyper_parallel.partials import BUCKET_NUMEL
from hyper_parallel_mindspore import ascend_math, process_groups
from hyper_parallel_mindspore.ascend_math import AscendMath
from tests.mindspore_backend.oracle import norm, rounded
from tests.mindspore_backend.tensors import array, tensor

ORDERS = (2.0, 1.0, 3.0, 0.5, 0.0, -1.0, math.inf, -math.inf)
DTYPES = ("float32", "bfloat16", "float16")
MATH = AscendMath()


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_statistic(dtype: str, p: float) -> None:
    parts = [rounded(random(*shape, seed=i), dtype) for i, shape in enumerate([(4097,), (3, 5), (8192,), ()])]
    tensors = [*(tensor(part, dtype) for part in parts), tensor(np.zeros((0, 2)), dtype)]
    found = MATH.statistic(tensors, NormKind(p), None)
    assert found.dtype == mindspore.float32
    assert found.shape == ()
    expected = norm(parts, p)
    assert float(NormKind(p).root(found.asnumpy())) == pytest.approx(expected, rel=2e-6, abs=0)


@pytest.mark.parametrize("p", [p for p in ORDERS if p != 0])
@pytest.mark.parametrize("where", [0, 100, 4095, 4096, 4999])
def test_nan_survives(where: int, p: float) -> None:
    values = random(5000)
    values[where] = math.nan
    for tensors in ([tensor(values), tensor([1.0])], [tensor([1.0]), tensor(values)]):
        assert math.isnan(float(array(MATH.statistic(tensors, NormKind(p), None))))


@pytest.mark.parametrize("p", ORDERS)
def test_nothing_gives_the_identity(p: float) -> None:
    kind = NormKind(p)
    assert float(array(MATH.statistic([tensor(np.zeros((0, 3)))], kind, None))) == kind.identity


def test_pack_read_where_and_cast() -> None:
    statistic = MATH.statistic([tensor([3.0, 4.0])], NormKind(2), None)
    buffer = MATH.pack([1.0, 0.0, statistic, 2.0, statistic != statistic], None)
    assert buffer.dtype == mindspore.float32
    assert MATH.read(buffer, True) == [1.0, 0.0, 25.0, 2.0, 0.0]
    assert MATH.read(buffer, False) is None
    assert MATH.read(MATH.where(buffer[2] > 1, 1.0, buffer[3]), True) == [1.0]
    assert MATH.read(MATH.where(buffer[1] > 1, 1.0, buffer[3]), True) == [2.0]
    for value in (statistic, 25.0, buffer[2]):
        found = MATH.cast(value, mindspore.bfloat16, None)
        assert (found.shape, found.dtype, float(array(found))) == ((), mindspore.bfloat16, 25.0)


def test_scaling_in_place_of_16_bit_gradients_and_out_of_place() -> None:
    for dtype in DTYPES:
        held = tensor([3.0, -5.0], dtype)
        (new,) = MATH.scaled([held], tensor(0.3))
        expected = rounded(np.float32([3.0, -5.0]) * np.float32(0.3), dtype)
        np.testing.assert_array_equal(array(new), expected)
        assert new.dtype == held.dtype
        assert array(held).tolist() == [3.0, -5.0]
        if dtype != "float32":  # Tensor.mul_ works in place on an NPU only
            MATH.scale_([held, held], tensor(0.3), None)
            np.testing.assert_array_equal(array(held), expected)


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(ValueError, match="expanded"):
        MATH.statistic([tensor([1.0]), tensor([[1.0]]).broadcast_to((4, 2))], NormKind(2), None)
    with pytest.raises(TypeError, match=r"numpy.ndarray.*mindspore"):
        MATH.statistic([np.ones(2)], NormKind(2), None)


def test_the_other_operations() -> None:
    held = tensor([[-3.0, 0.5, math.nan], [2.0, 1.0, -0.25]])
    pieces = [(held, 3, 5), (None, 0, 1), (tensor([7.0], "bfloat16"), 0, 1)]
    assert array(MATH.flatten(pieces, 6, -1.0, None)).tolist() == [2, 1, -1, 7, -1, -1]
    assert MATH.nonfinite_count(held) == 1
    assert MATH.nonfinite_count(tensor([])) == 0
    assert float(array(MATH.checksum(held))) == float(array(MATH.checksum(held + 0)))
    assert float(array(MATH.checksum(held))) != float(array(MATH.checksum(held * 2)))
    MATH.clamp_([held, tensor([])], 1.0, None)
    np.testing.assert_array_equal(array(held), [[-1.0, 0.5, math.nan], [1.0, 1.0, -0.25]])
    with pytest.raises(RuntimeError, match="foreach"):
        MATH.statistic([Tensor([1.0])], NormKind(2), True)


def test_tensors_that_have_not_been_on_the_device_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "data_ptr", lambda tensor: 0)
    held = [tensor([3.0], "bfloat16"), tensor([5.0], "bfloat16")]
    MATH.scale_([*held, held[0]], tensor(0.5), None)
    assert [array(t).tolist() for t in held] == [[1.5], [2.5]]


def test_constants_are_put_on_the_device_once_and_stay_what_they_are() -> None:
    statistic = MATH.statistic([tensor([3.0, 4.0])], NormKind(2), None)
    for _ in range(2):
        buffer = MATH.pack([statistic, 1.0, -0.0], None)
        MATH.pack([statistic, 1.0, 0.0], None)
        assert math.copysign(1, MATH.read(buffer, True)[2]) == -1
        buffer.copy_(buffer * 0)
    transferred = ascend_math._transferred.cache_info()
    MATH.pack([statistic, 1.0, -0.0], None)
    assert ascend_math._transferred.cache_info().misses == transferred.misses
    alone = MATH.pack([1.0], None)
    alone.copy_(alone * 0)
    assert MATH.read(MATH.pack([1.0], None), True) == [1.0]


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7])
def test_many_equal_elements_add_up(value: float) -> None:
    found = float(array(MATH.statistic([mindspore.mint.ones(20_000_003) * value], NormKind(2), None)))
    assert math.sqrt(found) == pytest.approx(
        math.sqrt(20_000_003) * float(np.float32(value)), rel=1e-6, abs=0
    )


@pytest.mark.parametrize("number", [2**23 + 1, 2**24 - 1])
def test_counts_that_float32_knows_are_exact(number: int) -> None:
    statistic = MATH.statistic([mindspore.mint.ones(number)], NormKind(0), None)
    assert float(array(NormKind(0).root(statistic))) == number


def test_no_finite_element_is_blamed_in_a_tensor_with_more_than_float32_can_count() -> None:
    ones = mindspore.mint.ones(2**24 + 3)
    assert MATH.nonfinite_count(ones) == 0
    assert MATH.nonfinite_count(mindspore.mint.cat([ones, tensor([math.nan, -math.inf])])) == 2


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Rank 2 of 4 on an NPU; the groups that are created."""
    calls: list[tuple] = []
    monkeypatch.setattr(mindspore, "get_context", {"device_target": "Ascend"}.get)
    for name, value in (("is_initialized", True), ("get_rank", 2), ("get_world_size", 4)):
        monkeypatch.setattr(mindspore.mint.distributed, name, lambda value=value: value)
    monkeypatch.setattr(process_groups, "create_group", lambda *args: calls.append(args))
    process_groups._created.cache_clear()
    yield calls
    process_groups._created.cache_clear()


def test_hccl_groups_are_made_of_a_rank_list_with_a_small_buffer(created: list[tuple]) -> None:
    """HCCL's buffers take NPU memory for each group; names are limited to 127 characters."""
    names = [process_groups.group_name(ranks) for ranks in ((0, 2), (1, 2), (0, 2), tuple(range(4)))]
    assert names[0] == names[2] != names[1]
    assert names[3] == "hccl_world_group"
    assert [(name, ranks) for name, ranks, _ in created] == [(names[0], [0, 2]), (names[1], [1, 2])]
    assert all(len(name) < 128 for name in names)
    for _, _, options in created:
        megabytes = options.hccl_config["hccl_buffer_size"]
        assert 4 * BUCKET_NUMEL <= megabytes * 2**20 <= 64 * 2**20


def test_a_group_of_many_ranks_has_a_short_name(
    created: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mindspore.mint.distributed, "get_world_size", lambda: 10_000)
    assert len(process_groups.group_name(tuple(range(0, 10_000, 2)))) < 128

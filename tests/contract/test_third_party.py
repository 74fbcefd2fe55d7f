"""NumPy is a third party's platform: found through an entry point, cached, and used by the public calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hyper_parallel
from hyper_parallel import Mesh, Replicate, Shard, StridedShard
from hyper_parallel.platforms import ENVIRONMENT_VARIABLE
from tests.contract.numpy_platform import NumpyPlatform, Parameter, Tensor
from tests.contract.numpy_world import World

pytestmark = pytest.mark.usefixtures("numpy_ranks")


def test_the_entry_point_of_an_installed_distribution_is_found(third_party: Path) -> None:
    assert [path.name for path in third_party.iterdir()] == ["numpy_ranks-1.0.dist-info"]
    assert type(hyper_parallel.get_platform()) is NumpyPlatform
    assert hyper_parallel.get_platform().name == "numpy"


def test_the_platform_is_kept_when_the_variable_changes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = hyper_parallel.get_platform()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "nobody")
    assert hyper_parallel.get_platform() is chosen


def test_an_unknown_name_lists_the_third_partys_among_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "nobody")
    with pytest.raises(LookupError, match=r"nobody.*mindspore, numpy, torch"):
        hyper_parallel.get_platform.__wrapped__()


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        ((Shard(0), Replicate()), [(0, 2), (0, 2), (2, 4), (2, 4)]),
        ((Replicate(), Shard(0)), [(0, 2), (2, 4), (0, 2), (2, 4)]),
    ],
)
def test_distribute_tensor_gives_each_rank_its_part_as_a_dtensor(placements: tuple, expected: list) -> None:
    values = np.arange(8.0).reshape(4, 2)

    def build(rank: int) -> Parameter:
        mesh = hyper_parallel.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return hyper_parallel.distribute_tensor(values, mesh, placements)

    for parameter, (start, stop) in zip(World(4).values(build), expected, strict=True):
        assert isinstance(parameter, hyper_parallel.DTensor)
        assert (parameter.data == values[start:stop]).all()


def test_the_calls_work_on_what_the_portable_constructors_build() -> None:
    values = np.arange(16.0).reshape(8, 2)

    def clip(rank: int) -> float:
        mesh = hyper_parallel.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        strided = hyper_parallel.distribute_tensor(values, mesh, [StridedShard(0, split_factor=2), Shard(0)])
        local = np.full((1, 3), 2.0).view(Tensor)
        even = hyper_parallel.DTensor.from_local(local, mesh, [Shard(0), Replicate()])
        attached = hyper_parallel.attach_layout(Parameter(np.ones(3)), mesh, [Shard(0), Shard(0)], (12,))
        parameters = [strided, even, attached]
        for parameter in parameters:
            parameter.grad = np.array(parameter.data)
        return float(hyper_parallel.clip_grad_norm_(parameters, 1.0))

    expected = np.sqrt((values**2).sum() + 2 * 3 * 4 + 12)
    assert World(4).values(clip) == [pytest.approx(expected)] * 4


def test_attach_layout_refuses_a_shard_of_another_shape_and_a_dtensor() -> None:
    mesh = Mesh((1,), (0,))
    with pytest.raises(
        ValueError, match=r"puts a shard of shape \(5,\) on rank 0, but the tensor has \(3,\)"
    ):
        hyper_parallel.attach_layout(Parameter(np.ones(3)), mesh, [Shard(0)], (5,))
    with pytest.raises(TypeError, match="layout of its own"):
        hyper_parallel.attach_layout(
            hyper_parallel.distribute_tensor(np.ones(3), mesh, [Shard(0)]), mesh, [Shard(0)]
        )
    with pytest.raises(ValueError, match="names a dim"):
        hyper_parallel.attach_layout(Parameter(np.ones(3)), mesh, [Shard(1)])
    with pytest.raises(ValueError, match="2 placements"):
        hyper_parallel.attach_layout(Parameter(np.ones(3)), mesh, [Shard(0), Replicate()])


def test_dtensor_is_not_called_itself() -> None:
    with pytest.raises(TypeError, match="from_local"):
        hyper_parallel.DTensor()

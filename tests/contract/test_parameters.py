"""The ``Parameters``, ``Collectives`` and ``Construction`` roles in a single process without a process group."""

from __future__ import annotations

import numpy as np
import pytest

import hyper_parallel
from hyper_parallel import Layout, Mesh, Replicate, Shard
from hyper_parallel.interface import LAYOUT_ATTRIBUTE, Platform
from hyper_parallel.platforms import get_platform
from tests.contract.backends import BACKENDS, KITS, Kit

ALONE = Mesh((1,), (0,), ("dp",))


@pytest.fixture
def platform(kit: Kit) -> Platform:
    return get_platform()


def own(platform: Platform, parameter):
    """The gradient that the platform reads from one parameter."""
    (gradient,), _ = platform.gradients([parameter], None)
    return gradient


def signature(platform: Platform, *parameters, given=None) -> list:
    return list(platform.gradients(parameters, given)[1])


def test_the_platform_names_itself(kit: Kit, platform: Platform) -> None:
    assert platform.name == kit.platform


# ---- parameters


def test_a_module_gives_its_parameters_in_order_and_their_names(kit: Kit, platform: Platform) -> None:
    members = {"weight": kit.parameter([[1.0]]), "bias": kit.parameter([2.0])}
    parameters, names = platform.parameters(kit.module(members))
    assert names == ["weight", "bias"]
    assert all(found is member for found, member in zip(parameters, members.values(), strict=True))


def test_a_tensor_is_a_list_of_one(kit: Kit, platform: Platform) -> None:
    for tensor in (kit.parameter([1.0]), kit.tensor([1.0])):
        parameters, names = platform.parameters(tensor)
        assert len(parameters) == 1
        assert parameters[0] is tensor
        assert names == []


def test_an_iterable_is_read_once_and_keeps_order_and_repetitions(kit: Kit, platform: Platform) -> None:
    a, b = kit.parameter([1.0]), kit.parameter([2.0])
    for iterable in ([a, b, a], (a, b, a), iter([a, b, a]), (p for p in [a, b, a])):
        parameters, names = platform.parameters(iterable)
        assert [id(p) for p in parameters] == [id(a), id(b), id(a)]
        assert names == []


def test_nothing_is_an_empty_list(kit: Kit, platform: Platform) -> None:
    assert platform.parameters([]) == ([], [])


class Foreign:
    """A tensor of some other framework."""

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.ones(2)


@pytest.mark.parametrize("position", [0, 1])
def test_a_tensor_of_another_framework_is_refused_naming_both(
    kit: Kit, platform: Platform, position: int
) -> None:
    tensors = [kit.parameter([1.0])]
    tensors.insert(position, Foreign())
    with pytest.raises(TypeError) as refused:
        platform.parameters(tensors)
    message = str(refused.value)
    assert "Foreign" in message
    assert kit.platform in message
    assert f"tensor {position}" in message


def test_real_tensors_of_the_other_backends_are_refused_naming_both(kit: Kit, platform: Platform) -> None:
    for other in {KITS[name]().platform for name in BACKENDS} - {kit.platform}:
        tensor = KITS[other]().tensor([1.0])
        with pytest.raises(TypeError, match=rf"(?s)(?=.*{other}).*{kit.platform}"):
            platform.parameters([tensor])


@pytest.mark.parametrize("wrong", [3, 1.5, None])
def test_what_is_no_tensor_at_all_is_refused(kit: Kit, platform: Platform, wrong) -> None:
    with pytest.raises(TypeError, match=type(wrong).__name__):
        platform.parameters(wrong)
    with pytest.raises(TypeError, match=type(wrong).__name__):
        platform.parameters([wrong])


# ---- gradients


def test_no_gradient_is_none(kit: Kit, platform: Platform) -> None:
    assert own(platform, kit.parameter([1.0])) is None


def test_grad_is_found(kit: Kit, platform: Platform) -> None:
    parameter = kit.graded([2.0])
    assert own(platform, parameter) is parameter.grad


def test_main_grad_comes_before_grad(kit: Kit, platform: Platform) -> None:
    parameter = kit.graded([2.0], "float16")
    parameter.main_grad = kit.tensor([3.0], "float32")
    assert own(platform, parameter) is parameter.main_grad
    parameter.main_grad = None
    assert own(platform, parameter) is parameter.grad


def test_main_grad_alone_is_enough(kit: Kit, platform: Platform) -> None:
    parameter = kit.parameter([1.0])
    parameter.main_grad = kit.tensor([3.0])
    assert own(platform, parameter) is parameter.main_grad


def test_explicit_gradients_come_before_both_and_may_be_none(kit: Kit, platform: Platform) -> None:
    parameters = [kit.graded([2.0]), kit.graded([2.0])]
    parameters[0].main_grad = kit.tensor([3.0])
    given = [kit.tensor([4.0]), None]
    local, _ = platform.gradients(parameters, given)
    assert local[0] is given[0]
    assert local[1] is None


def test_a_frozen_parameter_has_no_gradient_of_its_own(kit: Kit, platform: Platform) -> None:
    parameter = kit.parameter([1.0], requires_grad=False)
    parameter.main_grad = kit.tensor([3.0])
    assert own(platform, parameter) is None


def test_the_signature_stays_while_only_values_change(kit: Kit, platform: Platform) -> None:
    parameters = [kit.graded([2.0]), kit.parameter([1.0])]
    before = signature(platform, *parameters)
    kit.set_grad(parameters[0], kit.tensor([5.0]))
    assert signature(platform, *parameters) == before
    assert hash(tuple(before)) == hash(tuple(signature(platform, *parameters)))


def test_the_signature_changes_when_a_parameter_is_frozen(kit: Kit, platform: Platform) -> None:
    parameter = kit.parameter([1.0])
    before = signature(platform, parameter)
    parameter.requires_grad = False
    assert signature(platform, parameter) != before


def test_the_signature_changes_when_a_layout_is_attached(kit: Kit, platform: Platform) -> None:
    parameter = kit.graded([1.0, 2.0])
    before = signature(platform, parameter)
    hyper_parallel.attach_layout(parameter, ALONE, [Shard(0)])
    sharded = signature(platform, parameter)
    assert sharded != before
    hyper_parallel.attach_layout(parameter, ALONE, [Replicate()])
    assert signature(platform, parameter) != sharded


# ---- describe


def test_describe_a_plain_parameter(kit: Kit, platform: Platform) -> None:
    for parameter, requires_grad in (
        (kit.parameter(np.ones((2, 3))), True),
        (kit.parameter(np.ones((2, 3)), requires_grad=False), False),
        (kit.graded(np.ones((2, 3))), True),
    ):
        description = platform.describe(parameter, None)
        assert description.local_shape == description.global_shape == (2, 3)
        assert description.layout is None
        assert description.requires_grad is requires_grad


def test_describe_a_0d_and_an_empty_parameter(kit: Kit, platform: Platform) -> None:
    assert platform.describe(kit.graded(2.0), None).local_shape == ()
    assert platform.describe(kit.graded(np.zeros((0, 2))), None).local_shape == (0, 2)


def test_describe_reads_an_attached_layout_of_the_parameter_or_the_gradient(
    kit: Kit, platform: Platform
) -> None:
    mesh = Mesh((2,), (0, 1))
    layout = Layout(mesh, (Shard(0),), (5, 2))
    parameter, gradient = kit.parameter(np.ones((3, 2))), kit.tensor(np.ones((3, 2)))
    setattr(gradient, LAYOUT_ATTRIBUTE, layout)
    descriptions = [platform.describe(parameter, gradient)]
    hyper_parallel.attach_layout(parameter, mesh, [Shard(0)], (5, 2))
    descriptions.append(platform.describe(parameter, None))
    for description in descriptions:
        assert (description.local_shape, description.global_shape) == ((3, 2), (5, 2))
        assert description.layout == layout


def test_carries_gradient(kit: Kit, platform: Platform) -> None:
    frozen = kit.parameter([1.0], requires_grad=False)
    assert platform.carries_gradient(kit.parameter([1.0]))
    assert platform.carries_gradient(kit.graded([1.0]))
    assert not platform.carries_gradient(frozen)
    assert not platform.carries_gradient(kit.tensor([1.0]))


# ---- collectives and construction, one process


def test_without_a_process_group_this_is_rank_0(kit: Kit, platform: Platform) -> None:
    assert platform.rank() == 0
    assert all(0 in ranks for ranks in platform.groups())


def test_layout_takes_a_core_mesh_and_core_placements(kit: Kit, platform: Platform) -> None:
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    assert platform.layout(mesh, [Shard(-1), Replicate()], (3, 4)) == Layout(
        mesh, (Shard(1), Replicate()), (3, 4)
    )


def test_a_plain_tensor_is_no_dtensor(kit: Kit, platform: Platform) -> None:
    for value in (kit.tensor([1.0]), kit.parameter([1.0]), None, 3):
        assert not platform.is_dtensor(value)
        assert not isinstance(value, hyper_parallel.DTensor)

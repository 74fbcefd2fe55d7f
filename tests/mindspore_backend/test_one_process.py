"""Cells, parameters, DTensors and meshes in one process without any process group."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

import hyper_parallel
from hyper_parallel import DTensor, Layout, Mesh, Partial, Replicate, Shard
from hyper_parallel.interface import LAYOUT_ATTRIBUTE
from hyper_parallel.platforms import get_platform
from hyper_parallel_mindspore import process_groups
from tests.mindspore_backend.oracle import norm
from tests.mindspore_backend.tensors import array, tensor

ORDERS = (2.0, 1.0, 3.0, 0.5, 0.0, -1.0, math.inf, -math.inf)


class TwoLayers(nn.Cell):
    """A cell with a frozen bias and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(4, 3, weight_init="normal", bias_init="ones")
        self.second = nn.Dense(3, 1, weight_init="ones", bias_init="zeros")
        self.temperature = Parameter(tensor(2.0), name="temperature")
        self.second.bias.requires_grad = False

    def construct(self, x: Tensor) -> Tensor:
        return (self.second(mint.tanh(self.first(x))) * self.temperature).sum()


def gradients_of(net: nn.Cell) -> tuple[list[Parameter], tuple[Tensor, ...]]:
    parameters = list(net.trainable_params())
    inputs = tensor(np.random.default_rng(1).standard_normal((5, 4)))
    _, gradients = mindspore.value_and_grad(lambda: net(inputs), None, parameters)()
    return parameters, gradients


def coefficient(total: float, max_norm: float) -> float:
    return min(1.0, max_norm / (total + 1e-6))


@pytest.mark.parametrize("p", ORDERS)
def test_gradients_of_a_cell_in_place(p: float) -> None:
    parameters, gradients = gradients_of(TwoLayers())
    before = [array(g) for g in gradients]
    found = hyper_parallel.clip_grad_norm_(parameters, 1e-3, p, grads=gradients)
    expected = norm(before, p)
    assert isinstance(found, Tensor)
    assert found.shape == ()
    assert float(array(found)) == pytest.approx(expected, rel=1e-6, abs=0)
    for gradient, original in zip(gradients, before, strict=True):
        np.testing.assert_allclose(array(gradient), original * coefficient(expected, 1e-3), rtol=2e-6)


@pytest.mark.parametrize("p", ORDERS)
def test_gradients_of_a_cell_out_of_place(p: float) -> None:
    parameters, gradients = gradients_of(TwoLayers())
    before = [array(g) for g in gradients]
    new, found = hyper_parallel.clip_grads(gradients, 1e-3, p, params=parameters)
    expected = norm(before, p)
    assert float(array(found)) == pytest.approx(expected, rel=1e-6, abs=0)
    for gradient, clipped, original in zip(gradients, new, before, strict=True):
        np.testing.assert_allclose(array(clipped), original * coefficient(expected, 1e-3), rtol=2e-6)
        np.testing.assert_array_equal(array(gradient), original)


def test_a_cell_gives_names_and_leaves_frozen_parameters_alone() -> None:
    net = TwoLayers()
    parameters, names = get_platform().parameters(net)
    assert sorted(names) == ["first.bias", "first.weight", "second.bias", "second.weight", "temperature"]
    for parameter in parameters:
        parameter.grad = tensor(np.full(parameter.shape, 2.0))
    found = hyper_parallel.clip_grad_norm_(net, 1.0)
    assert float(array(found)) == pytest.approx(norm([np.full(12 + 3 + 3 + 1, 2.0)], 2.0))
    for parameter in parameters:
        changed = bool((array(parameter.grad) != 2.0).all())
        assert changed is parameter.requires_grad


def test_main_grad_is_clipped_rather_than_grad() -> None:
    parameter = Parameter(tensor([1.0, 1.0], "bfloat16"))
    parameter.grad, parameter.main_grad = tensor([9.0, 9.0], "bfloat16"), tensor([3.0, 4.0])
    found = hyper_parallel.clip_grad_norm_(parameter, 1.0)
    assert (found.dtype, float(array(found))) == (mindspore.float32, 5.0)
    np.testing.assert_allclose(array(parameter.main_grad), [0.6, 0.8], rtol=1e-6)
    assert array(parameter.grad).tolist() == [9.0, 9.0]


def test_an_iterable_is_read_once() -> None:
    parameters = [Parameter(tensor([1.0])), Parameter(tensor([1.0]))]
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = tensor([value])
    assert float(array(hyper_parallel.clip_grad_norm_((p for p in parameters), 2.5))) == 5.0
    np.testing.assert_allclose([array(p.grad)[0] for p in parameters], [1.5, 2.0], rtol=1e-6)


def test_mixed_dtypes_keep_theirs_and_give_the_widest() -> None:
    gradients = [tensor(np.full(128, 1 / 64), "bfloat16"), tensor(np.full(128, 1 / 64), "float16")]
    assert hyper_parallel.get_total_norm(gradients).dtype == mindspore.float32
    gradients.append(tensor(np.zeros(2), "float64"))
    found = hyper_parallel.get_total_norm(gradients)
    assert (found.dtype, float(array(found))) == (mindspore.float64, 0.25)


def test_nothing_at_all() -> None:
    for p, expected in ((2.0, 0.0), (0.0, 0.0), (math.inf, 0.0), (-math.inf, math.inf)):
        assert float(array(hyper_parallel.clip_grad_norm_([], 1.0, p))) == expected
        with pytest.warns(UserWarning, match="no tensor carries a gradient"):
            assert (
                float(array(hyper_parallel.clip_grad_norm_([Parameter(tensor([1.0]))], 1.0, p))) == expected
            )
        assert float(array(hyper_parallel.get_total_norm([tensor(np.zeros((0, 2)))], p))) == expected


def test_gradients_passed_as_parameters_warn() -> None:
    with pytest.warns(UserWarning, match="were gradients passed"):
        hyper_parallel.clip_grads_with_norm_([tensor([3.0])], 1.0, 3.0)


def test_clip_by_a_norm_of_any_kind() -> None:
    for total in (4.0, tensor(4.0), tensor(4.0, "bfloat16"), tensor(4.0, "float64")):
        parameter = Parameter(tensor([1.0]))
        parameter.grad = tensor([4.0])
        hyper_parallel.clip_grads_with_norm_(parameter, 1.0, total)
        np.testing.assert_allclose(array(parameter.grad), [1.0], rtol=1e-6)


@pytest.mark.parametrize("wrong", [np.ones(2), 3.0, "weights", [1.0], [np.ones(2)], {"w": 1}], ids=str)
def test_what_is_no_tensor_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="mindspore"):
        hyper_parallel.clip_grad_norm_(wrong, 1.0)


def test_zero_gradients_with_a_negative_order() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(array(hyper_parallel.get_total_norm([tensor([0.0, 2.0])], -1.0))) == 0.0
        assert float(array(hyper_parallel.get_total_norm([tensor(np.zeros((0,)))], -1.0))) == math.inf


def test_a_cell_of_dtensors_trains() -> None:
    mesh = hyper_parallel.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))

    class Linear(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            weight = hyper_parallel.distribute_tensor(tensor([[3.0], [4.0]]), mesh, [Shard(0)])
            self.weight = Parameter(weight, name="weight")

        def construct(self, x: Tensor) -> Tensor:
            return mint.matmul(x, self.weight).sum()

    net = Linear()
    (weight,) = net.trainable_params()
    assert isinstance(weight, DTensor)
    _, gradients = mindspore.value_and_grad(lambda: net(tensor([[3.0, 4.0]])), None, [weight])()
    assert float(array(hyper_parallel.clip_grad_norm_(net, 1.0, grads=gradients))) == 5.0
    nn.SGD(net.trainable_params(), 1.0)(gradients)
    np.testing.assert_allclose(array(net.weight), [[2.4], [3.2]], rtol=1e-6)
    np.testing.assert_allclose(array(net.weight.full_tensor()), [[2.4], [3.2]], rtol=1e-6)


# ---- DTensor


def dtensor(requires: bool = False) -> Any:
    mesh = hyper_parallel.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    made = DTensor.from_local(tensor([[1.0, 2.0]]), mesh, [Shard(0), Replicate()], (1, 2))
    return Parameter(made, name="w", requires_grad=False) if requires else made


def test_a_dtensor_shares_its_local_tensor() -> None:
    local = tensor([[1.0, 2.0], [3.0, 4.0]])
    mesh = hyper_parallel.init_device_mesh("cpu", (1,))
    made = DTensor.from_local(local, mesh, [Shard(1)])
    assert made.data_ptr() == local.data_ptr() == made.to_local().data_ptr() == Parameter(made).data_ptr()
    assert (made.shape, made.global_shape, made.placements) == ((2, 2), (2, 2), (Shard(1),))
    assert made.device_mesh == mesh
    assert not isinstance(made.to_local(), DTensor)
    assert not isinstance(made + 1, DTensor)
    assert isinstance(made, Tensor)
    assert isinstance(made, DTensor)


@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies_keep_the_layout_and_own_their_values(copied: Any, is_parameter: bool) -> None:
    original = dtensor(is_parameter)
    made = copied(original)
    assert isinstance(made, DTensor)
    assert made.layout == original.layout
    assert made.data_ptr() != original.data_ptr()
    assert array(made).tolist() == [[1.0, 2.0]]
    assert isinstance(made, Parameter) is is_parameter
    if is_parameter:
        assert (made.name, made.requires_grad) == ("w", False)


def test_a_clone_of_a_parameter_keeps_the_layout() -> None:
    made = dtensor(True).clone()
    assert isinstance(made, DTensor)
    assert isinstance(made, Parameter)
    assert made.placements == (Shard(0), Replicate())


def test_what_a_dtensor_refuses() -> None:
    mesh = hyper_parallel.init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match="global shape"):
        DTensor.from_local(tensor([1.0, 2.0]), mesh, [Shard(0)], (3,))
    with pytest.raises(ValueError, match="lacks"):
        DTensor.from_local(tensor([1.0, 2.0]), mesh, [Shard(1)])
    with pytest.raises(ValueError, match="placements"):
        hyper_parallel.distribute_tensor(tensor([1.0, 2.0]), mesh, [Shard(0), Shard(0)])
    with pytest.raises(ValueError, match="cannot tell the terms"):
        hyper_parallel.distribute_tensor(tensor([1.0, 2.0]), mesh, [Partial()])
    with pytest.raises(TypeError, match="layout of its own"):
        hyper_parallel.attach_layout(dtensor(), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="DeviceMesh"):
        hyper_parallel.attach_layout(tensor([1.0]), (1,), [Shard(0)])
    with pytest.raises(TypeError):
        DTensor()


def test_the_gradient_may_carry_the_layout() -> None:
    layout = Layout(Mesh((1,), (0,)), (Shard(0),), (2,))
    gradient = tensor([3.0, 4.0])
    setattr(gradient, LAYOUT_ATTRIBUTE, layout)
    platform = get_platform()
    assert platform.describe(Parameter(tensor([1.0, 1.0])), gradient).layout == layout
    (new,), _ = hyper_parallel.clip_grads([gradient], 1.0)
    assert getattr(new, LAYOUT_ATTRIBUTE) == layout
    (new,), _ = hyper_parallel.clip_grads([dtensor()], 1.0)
    assert isinstance(new, DTensor)


def test_numpy_and_back() -> None:
    platform = get_platform()
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        made = platform.from_numpy(np.array([[0.5, 2.0]]), dtype, "cpu")
        assert str(made.dtype).lower() == dtype
        assert platform.to_numpy(made).tolist() == [[0.5, 2.0]]
        assert platform.to_numpy(made).dtype == np.float64
    assert platform.to_numpy(dtensor()).tolist() == [[1.0, 2.0]]


# ---- meshes


def test_a_mesh_of_one_rank() -> None:
    mesh = hyper_parallel.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    assert (mesh.shape, mesh.ndim, mesh.size(), mesh.size("dp")) == ((1, 1), 2, 1, 1)
    assert mesh.get_coordinate() == [0, 0]
    assert mesh["tp"].get_local_rank() == mesh.get_local_rank("tp") == mesh.get_rank() == 0
    assert mesh["tp"].core.root == mesh.core
    assert repr(mesh) == "DeviceMesh(dp=1, tp=1; ranks (0,))"
    assert pickle.loads(pickle.dumps(mesh)) == mesh


@pytest.mark.parametrize(
    ("shape", "names"), [((2,), None), ((1, 0), None), ((1,), ("a", "b")), ((1, 1), ("a", "a"))]
)
def test_a_mesh_that_does_not_fit(shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
    with pytest.raises(ValueError, match=r"(?i)mesh"):
        hyper_parallel.init_device_mesh("cpu", shape, mesh_dim_names=names)


def test_slices_that_do_not_exist() -> None:
    mesh = hyper_parallel.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    for names in ("pp", ("dp", "pp"), ("tp", "dp"), ("dp", "dp"), ()):
        with pytest.raises(KeyError):
            mesh[names]
    with pytest.raises(RuntimeError, match="named"):
        mesh.get_local_rank()
    with pytest.raises(IndexError):
        mesh.size(2)
    with pytest.raises(KeyError):
        hyper_parallel.init_device_mesh("cpu", (1,))["dp"]


def test_all_slices_of_a_mesh_are_known_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "rank", lambda: 5)
    monkeypatch.setattr(process_groups, "world_size", lambda: 8)
    groups = process_groups.ProcessGroups()
    mesh = Mesh((2, 2, 2), tuple(range(8)), ("pp", "dp", "tp"))
    groups.note(mesh)  # without a process group this rank's number may not be known yet
    monkeypatch.setattr(mint.distributed, "is_initialized", lambda: True)
    assert groups.known() == {tuple(range(8))}
    groups.note(Mesh((2,), (5, 7), ("dp",), mesh))
    lines, planes = {(1, 5), (5, 7), (4, 5)}, {(1, 3, 5, 7), (0, 1, 4, 5), (4, 5, 6, 7)}
    assert groups.known() == {*lines, *planes, tuple(range(8))}
    groups.note(Mesh((2,), (5, 9)))
    assert (5, 9) not in groups.known()


def test_a_collective_without_a_process_group_raises() -> None:
    platform = get_platform()
    with pytest.raises(RuntimeError, match="no process group is initialised"):
        platform.all_reduce(platform.pack([1.0], None), "sum", (0, 1))
    parameter = hyper_parallel.attach_layout(Parameter(tensor([1.0])), Mesh((2,), (0, 1)), [Shard(0)], (2,))
    parameter.grad = tensor([1.0])
    with pytest.raises(
        RuntimeError, match=r"mindspore.communication.init\('mccl'\).*mint.distributed.init_process_group\(\)"
    ):
        hyper_parallel.clip_grad_norm_(parameter, 1.0)

"""Gradients in every form that torch can give them: strides, storages, aliases, dtypes, ``main_grad``, sparse."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import hyper_parallel
from tests.torch_backend.oracle import assert_scaled, factor, graded, norm_of, wide

INF = math.inf
Views = list[Callable[[torch.Tensor], torch.Tensor]]

FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(30, 40),
    "transposed": lambda: torch.randn(40, 30).t(),
    "permuted": lambda: torch.randn(5, 6, 7).permute(2, 0, 1),
    "channels last": lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "0-d": lambda: torch.randn(()),
    "empty": lambda: torch.zeros(0, 3),
    "one row with odd strides": lambda: torch.randn(2, 50)[:1].t(),
    "columns of a larger tensor": lambda: torch.randn(30, 40)[:, 5:17],
    "every other row": lambda: torch.randn(30, 40)[::2],
    "every other column, transposed": lambda: torch.randn(30, 40)[:, ::2].t(),
    "large with gaps": lambda: torch.randn(300, 9000)[:, :7000],
    "wide rows with gaps": lambda: torch.randn(2, 3_000_000)[:, :2_500_000],
    "large transposed": lambda: torch.randn(1200, 1000).t(),
    "complex": lambda: torch.randn(50, dtype=torch.complex64),
    "complex with gaps": lambda: torch.randn(40, 50, dtype=torch.complex64)[:, ::3],
}


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_counts_and_is_scaled_as_if_contiguous(form: str, foreach: bool | None) -> None:
    torch.manual_seed(0)
    for p in (2.0, 1.0, 3.0, INF, -INF, 0.0):
        parameters = [graded(torch.randn(7)), graded(FORMS[form]()), graded(torch.randn(9))]
        before = [wide(parameter.grad) for parameter in parameters]
        expected = norm_of(before, p)
        norm = hyper_parallel.clip_grad_norm_(parameters, 0.01, p, foreach=foreach)
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(expected, rel=1e-6), p
        assert_scaled([parameter.grad for parameter in parameters], before, factor(expected, 0.01))


def test_what_lies_between_the_elements_of_a_view_stays() -> None:
    whole = torch.randn(30, 40)
    before = whole.clone()
    hyper_parallel.clip_grad_norm_([graded(whole[:, 5:17]), graded(whole[::2, 20:])], 0.01)
    touched = torch.zeros(30, 40, dtype=torch.bool)
    touched[:, 5:17] = touched[::2, 20:] = True
    assert torch.equal(whole[~touched], before[~touched])
    assert not torch.equal(whole[touched], before[touched])


# ---- what is refused, before anything is written

REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "expanded": (lambda: torch.ones(1).expand(5), "expanded"),
    "expanded on one dim": (lambda: torch.randn(3, 1).expand(3, 4), "expanded"),
    "overlapping in itself": (lambda: torch.ones(12).as_strided((3, 3), (1, 1)), "expanded"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
}
CALLS: dict[str, Callable[[list[torch.nn.Parameter], bool | None], object]] = {
    "clip_grad_norm_": lambda ps, foreach: hyper_parallel.clip_grad_norm_(ps, 1.0, foreach=foreach),
    "clip_grads_with_norm_": lambda ps, foreach: hyper_parallel.clip_grads_with_norm_(
        ps, 1.0, 5.0, foreach=foreach
    ),
    "clip_grad_value_": lambda ps, foreach: hyper_parallel.clip_grad_value_(ps, 0.5, foreach=foreach),
    "get_total_norm": lambda ps, foreach: hyper_parallel.get_total_norm(
        [p.grad for p in ps], foreach=foreach
    ),
}


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", REFUSED)
def test_refused_gradients_leave_all_others_as_they_were(form: str, call: str, foreach: bool | None) -> None:
    build, word = REFUSED[form]
    odd = torch.nn.Parameter(torch.zeros(build().shape))
    odd.grad = build()
    others = [graded(torch.full((3,), 4.0)) for _ in range(2)]
    with pytest.raises(ValueError, match=word):
        CALLS[call]([others[0], odd, others[1]], foreach)
    assert all(torch.equal(other.grad, torch.full((3,), 4.0)) for other in others)


# ---- gradients that share storage


def clipped_views(views: Views, size: int = 24, others: tuple[torch.Tensor, ...] = ()) -> None:
    """Clip views of one storage (and more gradients): the norm counts each, and each element is scaled once."""
    base = torch.arange(1.0, size + 1)
    gradients = [*(view(base) for view in views), *others]
    before = [wide(gradient) for gradient in gradients]
    expected = norm_of(before, 2.0)
    norm = hyper_parallel.clip_grad_norm_([graded(gradient) for gradient in gradients], 1.0)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert_scaled(gradients, before, factor(expected, 1.0))
    touched = torch.zeros(size, dtype=torch.bool)
    for view in views:
        view(touched).fill_(True)
    assert torch.equal(base[~touched], torch.arange(1.0, size + 1)[~touched])


LAYOUTS: dict[str, Views] = {
    "one after another": [lambda b: b[:6], lambda b: b[6:8].view(2, 1), lambda b: b[8:24]],
    "in the opposite order": [lambda b: b[8:], lambda b: b[4:8], lambda b: b[:4]],
    "with a gap": [lambda b: b[:6], lambda b: b[7:9], lambda b: b[9:11]],
    "empty between": [lambda b: b[:6], lambda b: b[6:6], lambda b: b[6:9]],
    "0-d between": [lambda b: b[:6], lambda b: b[6], lambda b: b[7:9]],
    "transposed between": [lambda b: b[:6], lambda b: b[6:12].view(2, 3).t(), lambda b: b[12:]],
    "interleaved columns": [lambda b: b.view(4, 6)[:, :3], lambda b: b.view(4, 6)[:, 3:]],
    "not from the start": [lambda b: b[5:9], lambda b: b[9:11]],
    "twice": [lambda b: b[:6], lambda b: b[:6]],
    "twice, amid a run": [lambda b: b[:6], lambda b: b[6:9], lambda b: b[6:9], lambda b: b[9:]],
    "twice, transposed": [lambda b: b.view(4, 6).t(), lambda b: b.view(4, 6).t()],
    "twice, once transposed": [lambda b: b.view(4, 6), lambda b: b.view(4, 6).t()],
    "twice, with gaps": [lambda b: b.view(4, 6)[:, :3], lambda b: b.view(4, 6)[:, :3]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_one_storage(layout: str) -> None:
    clipped_views(LAYOUTS[layout])


def test_partly_overlapping_views_are_scaled_once_per_view_as_in_torch() -> None:
    ours, theirs = torch.ones(12), torch.ones(12)
    for base, clip in (
        (ours, hyper_parallel.clip_grad_norm_),
        (theirs, torch.nn.utils.clip_grad_norm_),
    ):
        assert clip([graded(base[:6]), graded(base[3:9])], 1.0).item() == pytest.approx(math.sqrt(12))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_tensors_that_touch_in_memory_but_have_storages_of_their_own() -> None:
    whole = np.arange(1, 25, dtype=np.float32)
    parts = [torch.from_numpy(whole[start:stop]) for start, stop in ((0, 6), (6, 10), (10, 24))]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 3
    before = [wide(part) for part in parts]
    norm = hyper_parallel.clip_grad_norm_([graded(part) for part in parts], 1.0)
    assert norm.item() == pytest.approx(norm_of(before, 2.0), rel=1e-6)
    assert_scaled(parts, before, factor(norm_of(before, 2.0), 1.0))


def test_dtypes_next_to_each_other_in_one_storage() -> None:
    raw = torch.zeros(64, dtype=torch.uint8)
    pieces = [
        (0, 16, torch.float32),
        (16, 32, torch.float16),
        (32, 40, torch.bfloat16),
        (40, 64, torch.float32),
    ]
    gradients = [raw[start:stop].view(dtype) for start, stop, dtype in pieces]
    for gradient in gradients:
        gradient.fill_(1.5)
    before = [wide(gradient) for gradient in gradients]
    expected = norm_of(before, 2.0)
    norm = hyper_parallel.clip_grad_norm_([graded(gradient) for gradient in gradients], 1.0)
    assert norm.item() == pytest.approx(expected, rel=1e-6)
    assert_scaled(gradients, before, factor(expected, 1.0))


# ---- parameters


def test_main_grad_comes_first_and_its_dtype_is_kept() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    parameter.grad = torch.tensor([100.0, 100.0], dtype=torch.bfloat16)
    parameter.main_grad = torch.tensor([3.0, 4.0])
    norm = hyper_parallel.clip_grad_norm_([parameter], 1.0)
    assert (norm.item(), norm.dtype) == (5.0, torch.float32)
    assert_scaled([parameter.main_grad], [np.array([3.0, 4.0])], factor(5.0, 1.0))
    assert torch.equal(parameter.grad, torch.tensor([100.0, 100.0], dtype=torch.bfloat16))


@pytest.mark.parametrize("listed", [False, True])
def test_tied_weights_count_once(listed: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model(torch.randn(3, 4)).square().sum().backward()
    before = wide(model[0].weight.grad)
    source = [model[0].weight, model[1].weight] if listed else model
    norm = hyper_parallel.clip_grad_norm_(source, 0.1)
    assert norm.item() == pytest.approx(norm_of([before], 2.0), rel=1e-6)
    assert_scaled([model[0].weight.grad], [before], factor(norm_of([before], 2.0), 0.1))


def test_a_sparse_embedding_is_named_as_what_it_is() -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(ValueError, match=r"sparse.*to_dense"):
        hyper_parallel.clip_grad_norm_(embedding, 1.0)


def test_integer_gradients_are_refused_before_anything_is_written() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))]
    given = [torch.ones(2), torch.ones(2, dtype=torch.int32)]
    for call in (
        lambda: hyper_parallel.clip_grad_norm_(parameters, 0.1, grads=given),
        lambda: hyper_parallel.clip_grad_value_(parameters, 0.1, grads=given),
    ):
        with pytest.raises(TypeError, match="int32"):
            call()
        assert given[0].tolist() == [1.0, 1.0]


def test_gradients_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match=r"a gradient is a numpy\.ndarray, but the platform is torch"):
        hyper_parallel.clip_grad_norm_([torch.nn.Parameter(torch.zeros(2))], 1.0, grads=[np.ones(2)])


@pytest.mark.parametrize("foreach", [None, True, False])
def test_one_memory_under_two_gradients_is_scaled_once(foreach: bool | None) -> None:
    gradient = torch.full((4,), 1.0)
    parameters = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(2, 2))]
    norm = hyper_parallel.clip_grad_norm_(
        parameters, 1.0, foreach=foreach, grads=[gradient, gradient.view(2, 2)]
    )
    assert norm.item() == pytest.approx(8**0.5)
    assert gradient.tolist() == pytest.approx([8**-0.5] * 4, rel=1e-6)


def test_float64_gradients_beyond_float32_are_clipped() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    parameter.grad = torch.full((4,), 1e40, dtype=torch.float64)
    norm = hyper_parallel.clip_grad_norm_([parameter], 1e40, error_if_nonfinite=True)
    assert norm.item() == pytest.approx(2e40)
    assert parameter.grad.tolist() == pytest.approx([5e39] * 4, rel=1e-6)

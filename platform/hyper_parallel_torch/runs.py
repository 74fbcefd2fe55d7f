"""Tensors that lie next to each other in memory, seen as one: FSDP2 keeps its local gradients that way."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def flattened(tensors: Sequence[Tensor], merge: bool) -> list[Tensor]:
    """1-d tensors with the elements of ``tensors`` in any order; only sparse views of larger tensors are copied.

    Raises:
        ValueError: a tensor is expanded (stride 0), so that scaling it in place would scale elements repeatedly.
    """
    dense: list[Tensor] = []
    for tensor in tensors:
        if tensor.is_contiguous():
            dense.append(tensor)
            continue
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(
                f"a gradient of shape {tuple(tensor.shape)} is expanded (strides {tensor.stride()}): its "
                "elements share memory and cannot be scaled in place; pass gradient.contiguous()"
            )
        dense.append(_in_memory_order(tensor).reshape(-1))
    runs = _merge(dense, aliases=True) if merge else dense
    return [run.reshape(-1) for run in runs]


def merged(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory in fewer tensors; what appears twice appears once."""
    contiguous = [tensor for tensor in tensors if tensor.is_contiguous()]
    others = {id(tensor): tensor for tensor in tensors if not tensor.is_contiguous()}
    return [*_merge(contiguous, aliases=False), *others.values()]


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A transposed or channels-last tensor permuted so that it is contiguous."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _merge(tensors: Sequence[Tensor], aliases: bool) -> list[Tensor]:
    """Contiguous tensors, joined where one begins at the end of the other; ``aliases`` keeps repeated ones."""
    runs: list[list[Tensor]] = []
    end, seen = -1, set()
    for tensor in tensors:
        start, length = tensor.data_ptr(), tensor.numel()
        if not length or (not aliases and (start, length) in seen):
            continue
        seen.add((start, length))
        if start == end and tensor.dtype == runs[-1][0].dtype:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
        end = start + length * tensor.element_size()
    return [joined for run in runs for joined in _joined(run)]


def _joined(run: list[Tensor]) -> list[Tensor]:
    """One view of a run, if the storage of its first tensor holds all of it."""
    first = run[0]
    if len(run) == 1:
        return run
    length = sum(tensor.numel() for tensor in run)
    storage = first.untyped_storage()
    if (first.storage_offset() + length) * first.element_size() > storage.nbytes():
        return run
    return [first.as_strided((length,), (1,), first.storage_offset())]

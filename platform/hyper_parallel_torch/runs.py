"""Tensors that lie next to each other in memory, seen as one: FSDP2 keeps its local gradients that way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, strided

from hyper_parallel_torch.devices import by_format


def readable(tensors: Sequence[Tensor], merge: bool) -> list[Tensor]:
    """Tensors with the elements of ``tensors`` in any order; nothing is copied.

    All are contiguous but the views that leave out elements of a larger tensor. Those in a private format are among
    them as they are: see ``devices.by_format``.

    Raises:
        ValueError: a tensor is sparse, or expanded (stride 0), so that it cannot be scaled in place.
    """
    dense, scattered = _by_density(tensors)
    return [*(_merge(dense, aliases=True) if merge else dense), *scattered]


def writable(tensors: Sequence[Tensor], merge: bool) -> list[Tensor]:
    """The same memory in as few tensors; what appears twice appears once.

    Raises:
        ValueError: as ``readable``, before anything is written.
    """
    dense, scattered = _by_density(tensors)
    different = {(t.data_ptr(), t.shape, t.stride(), t.dtype): t for t in scattered}
    if merge:
        return [*_merge(dense, aliases=False), *different.values()]
    whole = {(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else id(tensor): tensor for tensor in dense}
    return [*whole.values(), *different.values()]


def slabs(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Views that hold the elements ``start`` to ``stop`` of any tensor, in order."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    row = tensor[0].numel()
    while start < stop:
        first, skip = divmod(start, row)
        last = stop // row
        if skip or first == last:
            end = min(stop, (first + 1) * row)
            yield from slabs(tensor[first], skip, end - first * row)
        else:
            end = last * row
            yield tensor[first:last]
        start = end


def _by_density(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Contiguous tensors (transposed and channels-last ones in the order of their memory), and all others."""
    dense: list[Tensor] = []
    plain, scattered = by_format(tensors)
    for dtype in {tensor.dtype for tensor in tensors}:
        if not (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(f"a gradient has dtype {dtype}; floating-point and complex ones can be clipped")
    for tensor in plain:
        if tensor.is_contiguous():
            dense.append(tensor)
        else:
            _check_writable(tensor)
            ordered = _in_memory_order(tensor)
            (dense if ordered.is_contiguous() else scattered).append(ordered)
    return dense, scattered


def _check_writable(tensor: Tensor) -> None:
    shape = tuple(tensor.shape)
    if tensor.layout is not strided:
        raise ValueError(
            f"a gradient of shape {shape} is sparse ({tensor.layout}), which is not supported: pass "
            "gradient.to_dense(), or build the layer with sparse=False"
        )
    extents = [(size - 1) * stride for size, stride in zip(shape, tensor.stride(), strict=True) if size > 1]
    if not all(extents) or tensor.numel() > 1 + sum(extents):
        raise ValueError(
            f"a gradient of shape {shape} is expanded (strides {tensor.stride()}): its "
            "elements share memory and cannot be scaled in place; pass gradient.contiguous()"
        )


def _in_memory_order(tensor: Tensor) -> Tensor:
    """A transposed or channels-last tensor permuted so that it is contiguous."""
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def _merge(tensors: Sequence[Tensor], aliases: bool) -> list[Tensor]:
    """Contiguous tensors, joined where one begins at the end of the other; ``aliases`` keeps repeated ones."""
    runs: list[list[Tensor]] = []
    end, seen = -1, set()
    for tensor in tensors:
        start, size = tensor.data_ptr(), tensor.nbytes
        if not size:
            continue
        if not aliases:
            if (start, size) in seen:
                continue
            seen.add((start, size))
        if start == end and tensor.dtype == runs[-1][0].dtype:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
        end = start + size
    return [joined for run in runs for joined in (run if len(run) == 1 else _joined(run))]


def _joined(run: list[Tensor]) -> list[Tensor]:
    """One view of a run, if the storage of its first tensor holds all of it."""
    first = run[0]
    length = sum(tensor.numel() for tensor in run)
    storage = first.untyped_storage()
    if (first.storage_offset() + length) * first.element_size() > storage.nbytes():
        return run
    return [first.as_strided((length,), (1,), first.storage_offset())]

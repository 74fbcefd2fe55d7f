"""MindSpore tensors to and from NumPy, and what MindSpore is asked to communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint

from hyper_parallel.platforms import get_platform


def rank() -> int:
    return get_platform().rank()


def tensor(values: Any, dtype: str = "float32") -> Tensor:
    wide = np.array(values, np.float64 if dtype == "float64" else np.float32)
    return Tensor(wide).astype(getattr(mindspore, dtype))


def array(held: Tensor | None) -> np.ndarray | None:
    if held is None:
        return None
    return (
        (held if held.dtype == mindspore.float64 else held.astype(mindspore.float32))
        .asnumpy()
        .astype(np.float64)
    )


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """The names of the collectives that MindSpore is asked for meanwhile."""
    calls: list[str] = []
    originals = {name: getattr(mint.distributed, name) for name in ("all_reduce", "all_gather_object")}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **options)

        return call

    for name in originals:
        setattr(mint.distributed, name, wrapped(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(mint.distributed, name, original)
